from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch

from headrace.elasticsearch.errors import TargetChangedError, UnsuitableTargetError
from headrace.elasticsearch.open_target import OpenTarget
from headrace.elasticsearch.retry_budget import RetryBudget
from headrace.elasticsearch.target import ConcreteIndex

Concrete = Callable[[], ConcreteIndex | None]
INDEX: dict[str, Any] = {"settings": {"index": {"provided_name": "clicks-1"}}}


@pytest.fixture
def concrete(elasticsearch: FakeElasticsearch, make_options: Any, clock: Any) -> Concrete:
    """The index behind the name "clicks", by the server."""
    target = OpenTarget(elasticsearch, make_options().target)
    budget = RetryBudget("Asking", max_seconds=0, clock=clock, cancelled=threading.Event())
    return lambda: target.concrete(budget)


def test_the_name_of_an_index_stands_for_that_index(concrete: Concrete, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.indices["clicks"] = {}
    assert concrete() == ConcreteIndex("clicks", "uuid of clicks")


def test_there_is_no_concrete_index_behind_an_unused_name(concrete: Concrete) -> None:
    assert concrete() is None


def test_an_alias_of_one_index_stands_for_that_index(concrete: Concrete, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.descriptions["clicks"] = {"clicks-1": {"aliases": {"clicks": {}}, **INDEX}}
    assert concrete() == ConcreteIndex("clicks-1", None)


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
    concrete: Concrete, elasticsearch: FakeElasticsearch, description: dict[str, Any], says: str
) -> None:
    elasticsearch.descriptions["clicks"] = description
    with pytest.raises(UnsuitableTargetError, match=says):
        concrete()


BEHIND_ALIAS, INDEX_ITSELF = ("clicks-1", "u1"), ("clicks", "u1")


@pytest.mark.parametrize(
    ("known", "now"),
    [
        ((), None),
        ((), ConcreteIndex("any", "u")),
        ((BEHIND_ALIAS,), ConcreteIndex("clicks-1", "u1")),
        ((BEHIND_ALIAS,), ConcreteIndex("clicks-1", None)),
        ((("clicks-1", None),), ConcreteIndex("clicks-1", "u1")),
    ],
    ids=["first batch, no index", "first batch", "unchanged", "UUID not shown", "UUID not recorded"],
)
def test_later_batches_write_to_the_index_of_the_earlier_ones(
    make_options: Any, known: Any, now: ConcreteIndex | None
) -> None:
    """The first batch writes to any index."""
    make_options(known_indices=known).target.check_known(now)


@pytest.mark.parametrize(
    ("known", "now", "says"),
    [
        (BEHIND_ALIAS, None, "no index or alias 'clicks' any more. It was an alias of 'clicks-1'.* Make it an alias"),
        (INDEX_ITSELF, None, "no index or alias 'clicks' any more.* Restore it.*accept shop out --create`"),
        (BEHIND_ALIAS, ConcreteIndex("clicks-2", "u2"), "is an alias of 'clicks-2' now.* Point it to 'clicks-1' again"),
        (BEHIND_ALIAS, ConcreteIndex("clicks", "u2"), "'clicks' is an index now. It was an alias of 'clicks-1'"),
        (BEHIND_ALIAS, ConcreteIndex("clicks-1", "u2"), "'clicks-1' is not the one .* deleted and created again"),
        (INDEX_ITSELF, ConcreteIndex("clicks", "u2"), "'clicks' is not the one .* `headrace aliases accept shop out`"),
        (INDEX_ITSELF, ConcreteIndex("clicks-2", "u1"), "is an alias of 'clicks-2' now. It was that index"),
    ],
)
def test_another_index_than_that_of_earlier_batches_is_refused(
    make_options: Any, known: Any, now: ConcreteIndex | None, says: str
) -> None:
    options = make_options(known_indices=[known], stream_name="shop", output_id="out")
    with pytest.raises(TargetChangedError, match=says):
        options.target.check_known(now)
