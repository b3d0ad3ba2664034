"""What a person is shown of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hammer.kinds import Words
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
    assert Shown("failing", reason, remedy).names(Words(("Kafka",))) is named


@pytest.mark.parametrize(("remedy", "named"), [("Make room on that disk.", True), ("Start it.", False)])
def test_a_part_may_have_to_be_named_with_a_certain_remedy(*, remedy: str, named: bool) -> None:
    assert Shown("failing", "The disk is full", remedy).names(Words(("disk",), "Make room")) is named


def test_a_ledger_that_cannot_be_read_is_shown_with_its_remedy(tmp_path: Path) -> None:
    shown = Onlooker(f"sqlite:///{tmp_path / 'missing' / 'ledger.db'}", "hammer").look()
    assert shown.state == "error"
    assert shown.names(Words(("ledger",))), shown
