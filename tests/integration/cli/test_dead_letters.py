"""`headrace dead-letters list`, `show` and `replay`: a real Elasticsearch, and dead letters of an output."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.integration.dead_letter_shop import BATCHES, N_IS_A_LONG, Shop

from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.dead_letter_index import DeadLetterIndex, DeadLetterReplay
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.stream import KeyIds


@pytest.fixture
def make_shop(elasticsearch: str, tmp_path: Path) -> Iterator[Any]:
    made: list[Shop] = []

    def make(**fields: Any) -> Shop:
        made.append(Shop(elasticsearch, tmp_path, **fields))
        return made[-1]

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def shop(make_shop: Any) -> Shop:
    """Two batches, of whose records three were refused for the mapping and one is no JSON."""
    made: Shop = make_shop()
    made.write(b'{"n": 1}', b'{"n": "one"}', b"junk", b'{"n": 4.0, "a": "two"}')
    made.write(b'{"n": "five"}', b'{"n": "six"}', batch_time_ms=BATCHES[1], first=10)
    return made


def test_letters_are_listed_and_counted(shop: Shop) -> None:
    (reported,) = shop.reported("list")
    assert reported["reasons"] == {"document_parsing_exception": 3, "malformed_document": 1}
    newest_first = [shop.letter(f"clicks+0+{offset}") for offset in (10, 11, 1, 2)]
    assert [letter["id"] for letter in reported["letters"]] == newest_first
    assert "value" not in reported["letters"][0]
    text = shop.dead_letters("list", "--limit", "2").output
    assert "4 dead letters" in text
    assert "clicks+0+10" in text
    assert "These are 2 of them" in text


@pytest.mark.parametrize(
    ("narrowing", "offsets"),
    [
        ("--reason malformed_document", [2]),
        ("--batch 2023-11-14T22:13:40Z", [10, 11]),
        (f"--until {BATCHES[0]}", [1, 2]),
        (f"--from {BATCHES[1]}", [10, 11]),
        ("--offset 2-10", [10, 2]),
        ("--offset 11", [11]),
        ("--topic clicks --partition 0", [10, 11, 1, 2]),
        ("--topic other", []),
        ("--partition 1", []),
    ],
)
def test_a_list_is_restricted_by_its_options(shop: Shop, narrowing: str, offsets: list[int]) -> None:
    assert shop.listed(*narrowing.split()) == [f"clicks+0+{offset}" for offset in offsets]


def test_letters_of_other_streams_in_the_same_index_are_not_ours(shop: Shop) -> None:
    foreign = {"stream": "other", "output": "elasticsearch", "reason": {"type": "x", "text": ""}, "topic": "clicks"}
    shop.ask("PUT", f"/{shop.index}-dead-letters/_doc/foreign", foreign)
    assert "foreign" not in shop.listed()
    assert "no dead letter 'foreign'" in shop.dead_letters("show", "foreign").output


def test_a_letter_is_shown_with_all_it_holds(shop: Shop) -> None:
    text = shop.dead_letters("show", shop.letter("clicks+0+1")).output
    for part in ("2023-11-14T22:13:20.123Z", '{"n": "one"}', "key-1", "document_parsing_exception: ", "trace="):
        assert part in text
    letter = shop.reported("show", shop.letter("clicks+0+1"))
    assert base64.b64decode(letter["value"]) == b'{"n": "one"}'
    assert shop.dead_letters("show", shop.letter("clicks+0+2"), "--value").stdout_bytes == b"junk"
    assert shop.dead_letters("show", "nothing").exit_code == 1


def test_nothing_is_replayed_without_yes(shop: Shop) -> None:
    shop.correct_mapping()
    assert shop.reported("replay")["to_replay"] == 4
    assert "--yes" in shop.dead_letters("replay").output
    assert len(shop.documents()) == 2
    assert len(shop.listed()) == 4


def test_a_corrected_mapping_takes_all_letters_with_a_document(shop: Shop) -> None:
    """The letter without a document is refused again and stays."""
    shop.correct_mapping()
    result = shop.dead_letters("replay", "--yes")
    assert result.exit_code == 1
    assert "3 of 4 dead letters are replayed" in result.output
    assert "1 were refused again: 1 malformed_document" in result.output
    assert shop.documents()["clicks+0+11"] == {"n": "six"}
    assert len(shop.documents()) == 5
    assert shop.listed() == ["clicks+0+2"]
    assert len(shop.listed("--replayed")) == 4


def test_uncorrected_letters_are_refused_again_and_unchanged(shop: Shop) -> None:
    before = shop.documents("-dead-letters")
    reported = shop.reported("replay", "--yes")
    assert (reported["replayed"], reported["refused"]) == (0, 4)
    after = shop.documents("-dead-letters")
    assert after == before
    assert shop.dead_letters("replay", "--yes").exit_code == 1


def test_a_replay_that_stopped_before_marking_can_be_repeated(shop: Shop) -> None:
    shop.correct_mapping()
    shop.reported("replay", "--yes", "--batch", str(BATCHES[1]))
    assert shop.listed() == ["clicks+0+1", "clicks+0+2"]
    for id_ in ("clicks+0+10", "clicks+0+11"):
        shop.ask(
            "POST",
            f"/{shop.index}-dead-letters/_update/{quote(shop.letter(id_), safe='')}",
            {"doc": {"replayed_at": None}},
        )
    reported = shop.reported("replay", "--yes", "--batch", str(BATCHES[1]))
    assert (reported["replayed"], reported["documents"]["repeated"], reported["documents"]["created"]) == (2, 2, 0)
    assert shop.dead_letters("replay", "--yes", "--batch", str(BATCHES[1])).exit_code == 0


def test_letters_are_chosen_by_their_ids(shop: Shop) -> None:
    shop.correct_mapping()
    result = shop.dead_letters("replay", "--yes", "--id", shop.letter("clicks+0+1"), "--id", shop.letter("clicks+0+10"))
    assert result.exit_code == 0, result.output
    assert shop.listed() == ["clicks+0+11", "clicks+0+2"]


def test_a_replayed_letter_that_a_batch_rewrites_is_open_again(shop: Shop) -> None:
    shop.correct_mapping()
    shop.reported("replay", "--yes")
    shop.ask("DELETE", f"/{shop.index}")
    shop.ask("PUT", f"/{shop.index}", N_IS_A_LONG)
    shop.write(b'{"n": "five"}', batch_time_ms=BATCHES[1], first=10)
    assert shop.listed() == ["clicks+0+10", "clicks+0+2"]


def test_a_newer_version_of_a_key_is_not_written_over(make_shop: Any) -> None:
    shop = make_shop(output={"document_ids": KeyIds()})
    shop.write(b'{"n": "old"}', b'{"n": "b"}', first=5)
    shop.write(b'{"n": 7}', batch_time_ms=BATCHES[1], first=9)
    shop.ask("DELETE", f"/{shop.index}")
    shop.ask("PUT", f"/{shop.index}", {"mappings": {"properties": {"n": {"type": "keyword"}}}})
    shop.write(b'{"n": 7}', batch_time_ms=BATCHES[1], first=9)
    reported = shop.reported("replay", "--yes")
    assert reported["replayed"] == 2
    assert (reported["documents"]["superseded"], reported["documents"]["created"]) == (1, 1)
    assert shop.documents() == {"key-0": {"n": 7}, "key-1": {"n": "b"}}
    assert shop.listed() == []


def test_a_newer_document_of_column_ids_is_not_written_over(make_shop: Any) -> None:
    ids = {"kind": "columns", "columns": ["id"], "with_batch_time": False}
    output = {"document_ids": ids, "transform": "shop:with_id"}
    shop = make_shop(output=output)
    shop.write(b'{"n": "a"}', b'{"n": "b"}', id_0=["x", "y"])
    shop.ask("DELETE", f"/{shop.index}")
    shop.ask("PUT", f"/{shop.index}", {"mappings": {"properties": {"n": {"type": "keyword"}}}})
    shop.write(b'{"n": "newer"}', batch_time_ms=BATCHES[1], id_0=["x"])
    reported = shop.reported("replay", "--yes")
    assert (reported["replayed"], reported["documents"]["superseded"], reported["documents"]["created"]) == (2, 1, 1)
    assert shop.documents() == {"x": {"n": "newer"}, "y": {"n": "b"}}


def test_an_aggregates_existing_document_is_not_written_over(make_shop: Any) -> None:
    ids = {"kind": "columns", "columns": ["id"]}
    output = {"document_ids": ids, "transform": "shop:with_id", "write_method": "index"}
    shop = make_shop(output=output)
    shop.write(b'{"n": "a"}', id_0=["x"])
    ((id_, letter),) = shop.documents("-dead-letters").items()
    assert letter["document_id"] == f"x+{BATCHES[0]}"
    shop.correct_mapping()
    shop.ask("PUT", f"/{shop.index}/_doc/x+{BATCHES[0]}?refresh=true", {"m": 2})
    reported = shop.reported("replay", "--yes")
    assert (reported["replayed"], reported["documents"]["kept"]) == (1, 1)
    assert shop.documents() == {f"x+{BATCHES[0]}": {"m": 2}}
    assert [shop.letter(row) for row in shop.listed("--replayed")] == [id_]


def test_a_letter_rewritten_during_the_replay_is_not_marked(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.correct_mapping()
    index = DeadLetterReplay._index

    def while_a_batch_writes(self: Any, letters: Any, counts: Any) -> Any:
        letter = {**letters[0].fields, "batch_time": 1}
        shop.ask("PUT", f"/{shop.index}-dead-letters/_doc/{quote(letters[0].id, safe='')}", letter)
        return index(self, letters, counts)

    monkeypatch.setattr(DeadLetterReplay, "_index", while_a_batch_writes)
    reported = shop.reported("replay", "--yes", "--reason", "document_parsing_exception")
    assert (reported["replayed"], reported["written_anew"]) == (2, 1)
    assert shop.listed("--reason", "document_parsing_exception") == ["clicks+0+10"]


def test_letters_of_a_replays_index_go_to_that_index_alone(make_shop: Any) -> None:
    """They are chosen by the index's name, given with --index."""
    common = f"common-{uuid.uuid4().hex[:8]}"
    shop = make_shop(output={"dead_letter_index": common})
    copy = f"{shop.index}-copy"
    own = shop.stream
    shop.ask("PUT", f"/{copy}", N_IS_A_LONG)
    shop.stream = own.model_copy(update={"outputs": (own.outputs[0].model_copy(update={"index": copy}),)})
    shop.write(b'{"n": "one"}')
    shop.stream = own
    try:
        reported = shop.reported("replay", "--yes")
        assert (reported["replayed"], reported["left"]) == (0, 1)
        assert list(reported["left_because"]) == [
            f"its document belongs in index {copy!r}: give that index with --index"
        ]
        assert shop.reported("replay", "--index", copy)["to_replay"] == 1
    finally:
        shop.ask("DELETE", f"/{common}")


def test_only_letters_that_a_later_attempt_lacks_are_withdrawn(shop: Shop) -> None:
    (output,) = shop.stream.outputs

    def letters(**given: Any) -> DeadLetterIndex:
        options = IndexingOptions.of(output, Target.of(output, "shop"), batch_time_ms=BATCHES[0], **given)
        return DeadLetterIndex(
            Administration.of(shop.cluster, timeout_seconds=30, max_retry_seconds=10), options.target
        )

    assert letters().withdraw(BATCHES[0], 9) == 0, "letters that do not tell their attempt stay"
    for attempt, values in ((1, [b'{"n": "one"}', b"junk", b"other"]), (2, [b"junk"])):
        shop.write(*values, first=30, attempt=attempt)
    assert letters().withdraw(BATCHES[1], 3) == 0, "no letter is of an attempt at that batch"
    assert letters().withdraw(BATCHES[0], 1) == 0
    assert letters().withdraw(BATCHES[0], 2) == 2
    assert shop.listed("--offset", "30-39") == ["clicks+0+30"]


def test_control_characters_in_letters_are_escaped_in_a_terminal(shop: Shop) -> None:
    shop.write(b'\x1b[2J{"n": 1}', first=20)
    assert "field [n] of type [long]" in shop.dead_letters("list").output
    text = shop.dead_letters("show", shop.letter("clicks+0+20")).output
    assert "\\x1b[2J" in text
    assert "\x1b" not in text
