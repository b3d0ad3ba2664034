from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import DocumentsUnaccountedError
from headrace.elasticsearch.write_report import IndexingReport, ReportError


def report() -> IndexingReport:
    counts = IndexingCounts(rows=3, created=2, dead_lettered=1, seconds=0.5, dead_letter_reasons=Counter(malformed=1))
    return IndexingReport("s", "o", 1700, "clicks", "clicks-1", "clicks-dead-letters", 2, counts)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/reports/1-2-o.json"
    report().write(uri)
    assert IndexingReport.load(uri) == report()


def test_a_missing_or_foreign_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no report"):
        IndexingReport.load(f"{tmp_path}/none.json")
    (tmp_path / "other.json").write_text('{"version": 1}')
    with pytest.raises(ReportError, match="not an indexing report"):
        IndexingReport.load(f"{tmp_path}/other.json")


def test_counts_add_up() -> None:
    total = IndexingCounts()
    total.add(report().counts)
    total.add(report().counts)
    assert (total.rows, total.indexed, total.dead_letter_reasons["malformed"]) == (6, 4, 2)
    total.check()


def test_a_row_without_an_outcome_is_an_error() -> None:
    with pytest.raises(DocumentsUnaccountedError, match="Of 2 rows 1"):
        IndexingCounts(rows=2, created=1).check()
