from __future__ import annotations

import pytest

from headrace.stream import DeadLetterLimit, ElasticsearchOutput, StreamDefinitionError


@pytest.mark.parametrize(
    ("limit", "letters", "rows", "passed"),
    [
        (DeadLetterLimit(), 1, 1, None),
        (DeadLetterLimit(), 100, 100, None),
        (DeadLetterLimit(), 101, 202, None),
        (DeadLetterLimit(), 101, 201, "50% of dead_letter_limit.share"),
        (DeadLetterLimit(), 337, 336_776, None),
        (DeadLetterLimit(number=10), 11, 1_000, "the 10 of dead_letter_limit.number"),
        (DeadLetterLimit(number=10), 10, 10, None),
        (DeadLetterLimit(number=0), 1, 1_000, "the 0 of"),
        (DeadLetterLimit(share=0.01, tolerated=0), 1, 100, None),
        (DeadLetterLimit(share=0.01, tolerated=0), 2, 100, "the 1% of"),
        (DeadLetterLimit(share=1), 1_000, 1_000, None),
    ],
)
def test_a_limit_is_passed_by_number_or_by_share(
    limit: DeadLetterLimit, letters: int, rows: int, passed: str | None
) -> None:
    found = limit.passed(letters, rows)
    assert (found is None) is (passed is None)
    assert passed is None or passed in str(found)


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"share": -0.1}, {"number": -1}, {"tolerated": -1}, {"most": 1}])
def test_a_limit_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(StreamDefinitionError):
        ElasticsearchOutput(hosts="http://h:1", index="a", dead_letter_limit=wrong)
