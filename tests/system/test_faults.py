"""The hammer, for as long as a test may take: each part of a stream is hit once, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HEADRACE = [sys.executable, "-m", "headrace.cli.main"]
HAMMER = [sys.executable, "-m", "tests.hammer"]

pytestmark = [
    pytest.mark.timeout(1800),
    # On a slow machine it takes ten minutes, and CI has ninety for all.
    pytest.mark.skipif(not os.environ.get("HAMMER"), reason="the hammer: HAMMER=1 make system, or make faults"),
]


@pytest.fixture
def data() -> Iterator[Path]:
    """The hammer's folder; what is left in it is ended and deleted."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    # Postgres runs as nobody under root.
    folder.chmod(0o755)
    yield folder / "faults"
    subprocess.run([*HEADRACE, "stack", "down", "--data", folder / "faults", "--wipe"], check=True, capture_output=True)
    folder.rmdir()


def run_hammer(data: Path, targets: list[str], *options: str) -> dict[str, Any]:
    """The judgement of a run that holds, of at least three faults."""
    only = [word for target in targets for word in ("--only", target)]
    command = [*HAMMER, "--rate", "200", "--data", str(data), "--json", *options, *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1700)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, f"{found['problems']}\n{done.stderr}"
    assert found["holds"] is True
    assert found["faults"]["hit"] == found["faults"]["planned"] >= 3
    records = found["records"]
    assert records["acknowledged"] == records["indexed"] + records["dead_lettered"] == records["held_by_kafka"] > 0
    assert set(found["batches"]) == {"completed"}
    return found


def test_a_stream_under_the_hammer_loses_and_doubles_nothing(data: Path) -> None:
    # By this seed a batch, Elasticsearch twice, the disk, and a receiver past its lease.
    targets = ["receiver-task", "batch", "elasticsearch", "disk"]
    run_hammer(data, targets, "--minutes", "0.7", "--pace", "10", "--seed", "8")


def test_a_failing_network_loses_nothing_and_the_part_is_named(data: Path) -> None:
    # By this seed each link once, for a minute: the ledger's answers are lost, the others are cut.
    """The part behind each link that fails is named."""
    targets = ["kafka-link", "ledger-link", "search-link"]
    found = run_hammer(data, targets, "--network", "--minutes", "3.4", "--pace", "50", "--seed", "2331")
    assert set(found["faults"]["kinds"]) == {"ledger-link lost answers", "search-link cut", "kafka-link cut"}
