"""Which results an output's rows have in the metrics."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.views.metrics import Families, _add_output


@pytest.mark.parametrize(
    ("totals", "results"),
    [
        ({"rows": 7.0}, ["written"]),
        ({"rows": 7.0, "created": 7.0, "requests": 1.0}, ["created"]),
        ({"rows": 7.0, "ignored_tombstones": 7.0}, ["ignored_tombstones"]),
        ({"rows": 7.0, "dead_lettered": 7.0}, []),
    ],
    ids=["parquet", "created", "only tombstones", "only dead letters"],
)
def test_rows_are_written_only_where_no_other_result_is_known(
    totals: Mapping[str, float], results: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    families, found = Families(), []
    monkeypatch.setattr(
        families,
        "add",
        lambda metric, labels, _: found.append(labels[-1]) if metric == "headrace_output_rows_total" else None,
    )
    _add_output(families, ("shop", "index"), totals)
    assert found == results
