"""What makes a stream with state of a function that updates it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.integration.spark.state.stateful import COUNTS, Make, Stateful

from headrace.stream import ConsoleOutput, KafkaInput, State, Stream


@pytest.fixture
def make(spark: SparkSession, small_data: None, tmp_path: Path) -> Make:
    """A `Stateful` with a module's function as its update, and the fields of a State."""

    def made(update: Callable[..., Any], *, inputs: Any = None, remember: str = "1 h", **fields: Any) -> Stateful:
        state = {"update": f"{update.__module__}:{update.__name__}", "fields": COUNTS, "keys": "word", **fields}
        if "state_remember" in state:
            state["remember"] = state.pop("state_remember")
        stream = Stream(
            name="words",
            inputs=inputs or KafkaInput(id="words", bootstrap_servers="127.0.0.1:1", topics="words"),
            outputs=ConsoleOutput(transform=f"{update.__module__}:{update.__name__}"),
            batch_interval="10 s",
            remember=remember,
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            state=State(**state),
        )
        return Stateful(spark, stream)

    return made
