"""Events in words."""

from __future__ import annotations

from headrace.views.history import event_text


def test_changed_columns_are_told_with_their_version() -> None:
    payload = {
        "decoder": "orders.value_decoder",
        "subject": "orders-value",
        "version_before": 2,
        "version": 3,
        "differences": ["shop is new (STRING)", "pot is gone"],
    }
    wanted = "Schema changed (version 3 of orders-value): shop is new (STRING), pot is gone"
    assert event_text("schema_changed", payload) == wanted
