"""The tests of ids, versions, conflicts, dead letters and refusals, on every search server that headrace supports.

Their own files run them on Elasticsearch 8.19. This file runs them on the others, and besides what the commands do by
`Administration`: aliases, checks, dead letters that are read, replayed and withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import new_server_folder
from tests.integration.dead_letter_shop import BATCHES, Shop

# Pytest collects what a module imports.
from tests.integration.elasticsearch.test_ids import (  # noqa: F401
    TestAggregatesOutOfOrder,
    TestAnOldAttemptStillWritingWhileTheNewOneRuns,
    TestATopicCreatedAgain,
    TestPartitionGrowthWithKeyIds,
    TestSupersededAndRepeated,
    old_attempt,
    test_a_replay_after_a_rollover_is_refused,
    test_another_output_into_the_index_by_an_alias_is_refused,
)
from tests.integration.elasticsearch.test_mapping import (  # noqa: F401
    asking,
    test_a_body_is_applied_once_and_changes_nothing,
    test_a_long_array_of_numbers_may_become_a_vector,
    test_a_made_mapping_takes_values_at_edges,
    test_an_index_template_gives_a_new_index_its_mapping,
    test_an_older_kind_of_template_counts_as_it_does,
    test_the_records_own_json_fits_its_mapping,
    test_what_an_index_makes_of_a_new_field,
    test_what_is_said_of_each_field_is_what_the_server_does,
    test_without_it_the_first_text_makes_dead_letters,
)
from tests.integration.elasticsearch.test_real_elasticsearch import (  # noqa: F401
    test_a_blocked_index_is_waited_for_for_a_bounded_time,
    test_a_closed_index_fails_the_batch_without_dead_letters,
    test_a_concrete_index_is_found_and_a_rollover_alias_refused,
    test_a_missing_alias_becomes_no_index_and_is_used_when_back,
    test_a_missing_index_that_may_not_be_made_is_an_error,
    test_a_value_against_the_mapping_is_a_dead_letter_once,
    test_keys_hold_their_latest_value_in_any_order,
    test_malformed_values_are_dead_letters_and_others_indexed,
    test_odd_keys_are_ids,
    test_running_again_changes_nothing,
    test_the_answer_to_new_documents_is_not_parsed,
    test_the_one_document_in_a_templates_data_stream_is_deleted,
    test_the_same_version_of_another_record_is_superseded,
    test_values_that_only_look_odd_are_indexed_as_they_are,
    test_what_an_index_keeps_of_documents_tells_them_apart,
    test_what_the_index_took_once_is_settled_the_second_time,
    test_write_method_index_replaces_an_old_transforms_documents,
)
from tests.integration.elasticsearch.test_trouble import (  # noqa: F401
    test_a_batch_fails_if_its_dead_letters_cannot_be_written,
    test_a_field_unknown_to_a_strict_mapping_is_a_dead_letter,
    test_a_read_only_index_is_waited_for_and_nothing_is_lost,
    test_an_index_fault_fails_the_batch_without_a_dead_letter,
    test_later_documents_conflict_with_the_first_ones_mapping,
    test_only_a_document_against_the_mapping_is_a_dead_letter,
)

from headrace.checks.connecting import check_part
from headrace.devstack.elasticsearch import (
    ELASTICSEARCH_9,
    OPENSEARCH_2,
    OPENSEARCH_3,
    ElasticsearchServer,
    Release,
)
from headrace.devstack.errors import JavaMissingError
from headrace.devstack.jars import OLDEST_JAVA, find_jdk
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.errors import IndexNotWritableError, UnsuitableTargetError


@pytest.fixture(scope="module", params=[OPENSEARCH_2, ELASTICSEARCH_9, OPENSEARCH_3], ids=str)
def search_server(request: pytest.FixtureRequest) -> Iterator[str]:
    release: Release = request.param
    if release.java != OLDEST_JAVA:
        try:
            find_jdk(release.java)
        except JavaMissingError as missing:
            pytest.skip(f"{release}: {missing}")
    with new_server_folder() as folder, ElasticsearchServer(folder, heap="384m", release=release) as server:
        yield server.url


@pytest.fixture
def shop(search_server: str, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(search_server, tmp_path)
    yield made
    made.close()


@pytest.fixture
def administration(shop: Shop) -> Iterator[Administration]:
    with Administration.of(shop.cluster, timeout_seconds=30, max_retry_seconds=10) as made:
        yield made


def test_dead_letters_are_listed_and_replayed_once(shop: Shop) -> None:
    assert shop.write(b'{"n": 1}', b'{"n": "many"}', b'{"n": "more"}').dead_lettered == 2
    assert shop.listed() == ["clicks+0+1", "clicks+0+2"]
    refused = shop.reported("replay", "--yes")
    assert (refused["replayed"], refused["refused"]) == (0, 2)
    shop.correct_mapping()
    done = shop.reported("replay", "--yes")
    assert (done["letters"], done["replayed"], done["documents"]["created"]) == (2, 2, 2)
    assert shop.listed() == []
    assert shop.documents()["clicks+0+1"] == {"n": "many"}
    again = shop.reported("replay", "--yes")
    assert again["letters"] == 0


def test_letters_of_an_earlier_attempt_are_withdrawn(shop: Shop, administration: Administration) -> None:
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex
    from headrace.elasticsearch.target import Target

    shop.write(b"junk", b"junk", attempt=1)
    shop.write(b"junk", b'{"n": 1}', attempt=2)
    (output,) = shop.stream.outputs
    target = Target.of(output, "shop")  # type: ignore[arg-type]
    assert DeadLetterIndex(administration, target).withdraw(BATCHES[0], 2) == 1
    assert shop.listed() == ["clicks+0+0"]


def test_more_letters_than_a_page_are_read(shop: Shop, administration: Administration) -> None:
    from headrace.elasticsearch.dead_letter_index import IDS_PAGE, DeadLetterIndex, LetterFilter
    from headrace.elasticsearch.target import Target

    number = 2 * IDS_PAGE + 1
    shop.write(*[b"junk"] * number)
    (output,) = shop.stream.outputs
    target = Target.of(output, "shop")  # type: ignore[arg-type]
    found = [letter.id for letter in DeadLetterIndex(administration, target).find(LetterFilter(), contents=False)]
    assert found == [shop.letter(f"clicks+0+{n}") for n in range(number)]


def test_an_alias_moves_with_its_properties_and_only_to_an_index(shop: Shop, administration: Administration) -> None:
    alias, new = f"{shop.index}-live", f"{shop.index}-new"
    held = {"filter": {"term": {"n": 1}}, "search_routing": "1"}
    shop.ask("POST", "/_aliases", {"actions": [{"add": {"index": shop.index, "alias": alias, **held}}]})
    with pytest.raises(UnsuitableTargetError, match="is not the name of an index"):
        administration.move_alias(alias, new)
    shop.ask("PUT", f"/{new}")
    assert administration.move_alias(alias, new) == shop.index
    assert shop.ask("GET", f"/_alias/{alias}") == {new: {"aliases": {alias: held}}}
    with pytest.raises(UnsuitableTargetError, match="neither an index nor an alias"):
        administration.move_alias("nowhere", new)


def test_an_output_that_could_not_write_is_found_by_a_check(shop: Shop, administration: Administration) -> None:
    output: Any = shop.stream.outputs[0]
    (checked,) = check_part(output)
    # The embedded Elasticsearch 9 has no module for this request.
    version = (shop.transport.request("GET", "/").json() or {}).get("version", {"number": ""})
    product = {"opensearch": "OpenSearch"}.get(version.get("distribution"), "Elasticsearch")
    assert checked.error is None
    named = f"{product} {version['number']}".rstrip()
    assert f"({named}), index {shop.index}" in checked.where
    shop.ask("PUT", f"/{shop.index}/_settings", {"index.blocks.write": True})
    with pytest.raises(IndexNotWritableError, match=f"Index {shop.index} has the block write"):
        administration.check_writable(output)
    shop.ask("PUT", f"/{shop.index}/_settings", {"index.blocks.write": None})
    shop.ask("POST", "/_aliases", {"actions": [{"add": {"index": shop.index, "alias": f"{shop.index}-written"}}]})
    shop.ask("PUT", f"/{shop.index}-2", {"aliases": {f"{shop.index}-written": {}}})
    with pytest.raises(UnsuitableTargetError, match="alias of 2 indices"):
        administration.check_writable(output.model_copy(update={"index": f"{shop.index}-written"}))
