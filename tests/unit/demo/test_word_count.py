"""Reading the counts that a console output printed into a task's log."""

from __future__ import annotations

from collections import Counter

from examples.demo.word_count_demo import LINES, WordCounts, parse_counts, printed_batches

LOG = """\
2026-01-01T00:00:01Z info 4 records in 1 blocks
2026-01-01T00:00:02Z info -------------------------------------------
2026-01-01T00:00:02Z info Time: 1700000000000 ms (2023-11-14 22:13:20 UTC)
2026-01-01T00:00:02Z info -------------------------------------------
2026-01-01T00:00:02Z info ('row', 3)
2026-01-01T00:00:02Z info ('boat', 1)
2026-01-01T00:00:02Z info
2026-01-01T00:00:03Z info completed in 1.2 s
"""


def test_a_printed_batch_is_found_in_a_log() -> None:
    ((at, text),) = printed_batches(LOG)
    assert at == 1_700_000_000_000
    assert parse_counts(text) == Counter(row=3, boat=1)


def test_an_empty_batch_prints_its_heading_alone() -> None:
    ((_, text),) = printed_batches("\n".join(LOG.splitlines()[:4]))
    assert parse_counts(text) == Counter()


def test_a_log_without_output() -> None:
    assert list(printed_batches("nothing\nhere")) == []


def test_every_batch_together_has_to_count_every_word() -> None:
    sent = Counter(["a", "b", "b"])
    assert WordCounts(sent, {1: Counter(["a", "b"]), 2: Counter("b")}).holds
    assert not WordCounts(sent, {1: Counter(["a", "b"])}).holds
    assert not WordCounts(sent, {1: Counter(["a", "b", "b", "b"])}).holds
    assert not WordCounts(Counter(), {}).holds


def test_the_lines_have_no_more_words_than_the_rows_printed() -> None:
    assert len({word for line in LINES for word in line.split()}) <= 20
