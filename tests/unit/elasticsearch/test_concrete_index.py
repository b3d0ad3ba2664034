from __future__ import annotations

from typing import Any

import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch

from headrace.elasticsearch.concrete_index import ConcreteIndex, TargetIndex
from headrace.elasticsearch.errors import UnsuitableTargetError

INDEX: dict[str, Any] = {"settings": {"index": {"provided_name": "clicks-1"}}}


@pytest.fixture
def target(elasticsearch: FakeElasticsearch, make_options: Any, clock: Any) -> TargetIndex:
    return TargetIndex(elasticsearch, make_options(), clock=clock)


def test_the_name_of_an_index_stands_for_that_index(target: TargetIndex, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.indices["clicks"] = {}
    assert target.concrete() == ConcreteIndex("clicks", "uuid of clicks")


def test_there_is_no_concrete_index_behind_an_unused_name(target: TargetIndex) -> None:
    assert target.concrete() is None


def test_an_alias_of_one_index_stands_for_that_index(target: TargetIndex, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.descriptions["clicks"] = {"clicks-1": {"aliases": {"clicks": {}}, **INDEX}}
    assert target.concrete() == ConcreteIndex("clicks-1", None)


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ({"clicks-1": {"aliases": {"clicks": {"is_write_index": True}}, **INDEX}}, "rolls over"),
        (
            {
                "clicks-1": {
                    "aliases": {"clicks": {}},
                    "settings": {"index": {"lifecycle": {"rollover_alias": "clicks"}}},
                }
            },
            "rolls over",
        ),
        (
            {
                "clicks-1": {
                    "aliases": {"clicks": {}},
                    "settings": {
                        "index": {"plugins": {"index_state_management": {"rollover_alias": "clicks"}}},
                    },
                }
            },
            "rolls over",
        ),
        ({"clicks-1": {"aliases": {"clicks": {"index_routing": "1"}}, **INDEX}}, "a routing of its own"),
        ({name: {"aliases": {"clicks": {}}, **INDEX} for name in ("clicks-1", "clicks-2")}, "2 indices"),
        ({".ds-clicks-2026.01.01-000001": {"aliases": {}, "data_stream": "clicks"}}, "data stream"),
    ],
)
def test_a_name_that_can_hold_an_id_twice_is_refused(
    target: TargetIndex, elasticsearch: FakeElasticsearch, description: dict[str, Any], says: str
) -> None:
    elasticsearch.descriptions["clicks"] = description
    with pytest.raises(UnsuitableTargetError, match=says):
        target.concrete()
