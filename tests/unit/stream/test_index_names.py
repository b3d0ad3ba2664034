"""An index for each record, in the definition: what is taken, and what can be known to be wrong."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.stream.definitions import fields

from headrace.stream import (
    ElasticsearchOutput,
    KafkaInput,
    KeyIds,
    RecordIds,
    Stream,
    StreamDefinitionError,
)
from headrace.stream.stream import replayed


def output(index: Any, **more: Any) -> ElasticsearchOutput:
    return ElasticsearchOutput(**{"hosts": "http://h:1", "index": index, **more})


def stream(*outputs: ElasticsearchOutput, topics: Any = None, **more: Any) -> Stream:
    source = {"topic_pattern": "orders-.*"} if topics is None else {"topics": topics}
    return Stream(**fields(inputs=KafkaInput(bootstrap_servers="h:1", **source), outputs=outputs, **more))


def test_a_pattern_of_topics_to_an_index_each_is_one_line() -> None:
    made = stream(output("{topic}"))
    assert made.outputs[0].takes_blocks, "nothing has to pass through the JVM"
    assert Stream.from_json(made.to_json()) == made


def test_a_mapping_is_kept_as_it_is() -> None:
    made = stream(output({"a": "x", "b": "y-{timestamp:%Y}"}, index_zone="Europe/Berlin"), topics=("a", "b"))
    (again,) = Stream.from_json(made.to_json()).outputs
    assert again == made.outputs[0]
    assert again.names.zone == "Europe/Berlin"


@pytest.mark.parametrize(
    ("index", "letters"),
    [
        ("orders", "orders-dead-letters"),
        ("logs-{timestamp:%Y.%m.%d}", "logs-dead-letters"),
        ("{topic}", "mine-dead-letters"),
        ({"orders": "x"}, "mine-dead-letters"),
    ],
)
def test_the_letters_of_all_indices_are_in_one(index: Any, letters: str) -> None:
    one = output(index, id="mine")
    assert one.dead_letters == letters
    assert output(index, id="mine", dead_letter_index="other").dead_letters == "other"
    assert one.at("somewhere").dead_letters == letters
    assert one.at("somewhere").index == "somewhere"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"index": "{timestamp:%Y}", "document_ids": KeyIds()}, 'tombstones "delete" needs an index by topic or key'),
        ({"index": "{shop}", "document_ids": KeyIds(version_from="n")}, r"another \{shop\} than the document"),
        (
            {"index": "{topic}", "document_ids": KeyIds(version_from="n"), "truncates": "apply"},
            'truncates "apply" needs one index',
        ),
        ({"index": "{topic}", "index_zone": "Berlin"}, "no time zone"),
        ({"index": "{topic}", "max_indices": 0}, "max_indices"),
        ({"index": "x" * 250 + "{n}"}, "dead_letter_index would be"),
    ],
)
def test_what_can_not_work_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        output(**given)


@pytest.mark.parametrize("index", ["{topic}", "x-{key}", {"a": "x"}])
def test_deletions_find_the_index_by_topic_and_key(index: Any) -> None:
    assert output(index, document_ids=KeyIds()).deletes_by_key
    assert not output("{timestamp:%Y}", document_ids=KeyIds(), tombstones="ignore").deletes_by_key


@pytest.mark.parametrize(
    ("index", "topics", "words"),
    [
        ("{topic}", ("Orders",), "for topic Orders 'Orders' is no name for an index: it has capital letters"),
        ("{timestamp:%Y}-{topic}", ("a", "B"), "for topic B '0-B' is no name"),
        ("{topic}", (".x",), "for topic .x '.x' is no name for an index: it begins with a dot"),
        ({"a": "x", ".b": "{topic}-y"}, ("a", ".b"), "for topic .b '.b-y' is no name"),
        ("{key:%Y}-{offset:%m}", ("a",), r"has \{key:%Y\}, \{offset:%m\}, and that column of records is no time"),
        ({"a": "x"}, ("a", "b"), "names none for topic b, which the stream reads"),
        ({"a": "x", "c": "y"}, ("a",), "names one for topic c, which no input of the stream reads"),
        ("{shop}", ("a",), "names the column shop, which records do not have"),
    ],
)
def test_what_the_topics_show_is_refused(index: Any, topics: tuple[str, ...], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        stream(output(index), topics=topics)


def test_a_dot_that_the_definition_has_is_taken() -> None:
    stream(output(".{topic}", dead_letter_index="letters"), topics=("x",))
    stream(output({".x": ".x"}), topics=(".x",))


def test_a_time_that_a_transform_makes_of_the_value_is_taken() -> None:
    stream(output("{value:%Y}"), topics=("x",), transform="m:f")


@pytest.mark.parametrize(
    ("first", "second", "topics", "meet"),
    [
        ("{topic}", "{topic}", None, True),
        ("{topic}", "{topic}-copy", None, False),
        ("orders-{topic}", "orders-x", None, True),
        ("orders-{topic}", "orders-x", ("a", "b"), False),
        ("orders-{topic}", "orders-a", ("a", "b"), True),
        ("l-{timestamp:%Y}", "l-{timestamp:%Y-%m}", None, False),
        ({"a": "x", "b": "y"}, "y", ("a", "b"), True),
        ({"a": "x", "b": "y"}, {"a": "y", "b": "x"}, ("a", "b"), False),
    ],
)
def test_outputs_that_may_meet_with_one_id_are_refused(first: Any, second: Any, topics: Any, *, meet: bool) -> None:
    outputs = (output(first, id="one"), output(second, id="two", dead_letter_index="letters"))
    if not meet:
        stream(*outputs, topics=topics)
        return
    with pytest.raises(StreamDefinitionError, match=r"may also be the index of output one|is also the index of"):
        stream(*outputs, topics=topics)
    other = outputs[1].model_copy(update={"document_ids": RecordIds(rows=("n",))})
    stream(outputs[0], other, topics=topics, transform="m:f")


def test_columns_of_two_transforms_may_have_the_same_value() -> None:
    outputs = [output(index, id=id_, transform=f"m:{id_}") for id_, index in (("one", "{a}-x"), ("two", "{a}-x-x"))]
    with pytest.raises(StreamDefinitionError, match="may also be the index"):
        stream(*outputs)
    stream(*(each.model_copy(update={"transform": "m:f"}) for each in outputs))


def test_two_rows_of_one_record_may_have_one_id_and_index() -> None:
    """By a row's ``x`` and another's ``y``, though one row never has the same index in both."""
    outputs = [
        output(index, id=id_, document_ids=RecordIds(rows=(rows,)))
        for id_, index, rows in (("one", "{a}-x", "x"), ("two", "{a}-x-x", "y"))
    ]
    with pytest.raises(StreamDefinitionError, match="may also be the index"):
        stream(*outputs, transform="m:f")
    alike = outputs[1].model_copy(update={"document_ids": outputs[0].document_ids})
    stream(outputs[0], alike, transform="m:f")


def test_a_replay_needs_names_that_no_record_has_already() -> None:
    live = stream(output("{topic}", id="one"))
    made = replayed(live, {"one": {"index": "{topic}-v2"}})
    assert made.outputs[0].dead_letters == "v2-dead-letters"
    for index in ("{topic}", "orders-x", "{header.a}"):
        with pytest.raises(StreamDefinitionError, match="would write to index"):
            replayed(live, {"one": {"index": index, "dead_letter_index": "other"}})
