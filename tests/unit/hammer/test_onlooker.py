"""What a person is shown of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hammer.onlooker import Onlooker, Shown


@pytest.mark.parametrize(
    ("reason", "remedy", "named"),
    [
        ("KafkaError: no broker answers", "Start one.", True),
        ("kafka is away", "Start it.", True),
        ("Kafka is away", None, False),
        ("An executor was lost", "Give it memory.", False),
    ],
)
def test_a_part_is_named_only_with_a_remedy(reason: str, remedy: str | None, named: bool) -> None:
    assert Shown("failing", reason, remedy).names(("Kafka",)) is named


def test_a_ledger_that_cannot_be_read_is_shown_with_its_remedy(tmp_path: Path) -> None:
    shown = Onlooker(f"sqlite:///{tmp_path / 'missing' / 'ledger.db'}", "hammer").look()
    assert shown.state == "error"
    assert shown.names(("ledger",)), shown
