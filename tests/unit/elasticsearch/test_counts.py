from __future__ import annotations

from collections import Counter

import pytest

from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import DocumentsUnaccountedError


def counts() -> IndexingCounts:
    reasons = Counter(malformed=1)
    return IndexingCounts(rows=3, created=2, dead_lettered=1, seconds=0.5, dead_letter_reasons=reasons)


def test_counts_add_up() -> None:
    total = IndexingCounts()
    total.add(counts())
    total.add(counts())
    assert (total.rows, total.indexed, total.dead_letter_reasons["malformed"]) == (6, 4, 2)
    total.check()


def test_a_row_without_an_outcome_is_an_error() -> None:
    with pytest.raises(DocumentsUnaccountedError, match="Of 2 rows 1"):
        IndexingCounts(rows=2, created=1).check()
