"""Spark's quick example with real Spark: words of a socket's lines, by the stream of dags/word_count.py."""

from __future__ import annotations

import runpy
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.spark.application import Application

from headrace.ledger import BatchState, JobState, Ledger
from headrace.stream import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DAGS = Path(__file__).resolve().parents[3] / "dags"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(240)
        yield listening


@pytest.fixture
def application(tmp_path: Path, server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    monkeypatch.setenv("HEADRACE_LINES", f"127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.syspath_prepend(str(DAGS))
    monkeypatch.delitem(sys.modules, "deployment", raising=False)
    try:
        fields = runpy.run_path(str(DAGS / "word_count.py"))["stream"].model_dump(mode="json")
    finally:
        sys.modules.pop("deployment", None)
    fields |= {"batch_interval": "1 s", "storage": str(tmp_path / "storage"), "ledger": f"sqlite:///{tmp_path}/l.db"}
    stream = Stream(**fields)
    ledger = Ledger.open(stream.ledger)
    ledger.streams.register(
        stream.name,
        stream.to_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
    )
    made = Application(stream, ledger, "", tmp_path)
    yield made
    made.close()


def test_the_words_of_a_sockets_lines_are_counted(application: Application, server: socket.socket) -> None:
    process = application.start_job()
    application.running_job(process)
    client, _ = server.accept()
    with client:
        client.sendall(b"to be or not to be\n")
        time_ms = application.allocate_next()
        done = application.run_batch(time_ms)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[3:7] == ["('be', 2)", "('to', 2)", "('not', 1)", "('or', 1)"]
        assert application.ledger.batches.get(application.stream.name, time_ms).state is BatchState.COMPLETED
        application.ledger.jobs.request_stop(application.stream.name, "the test is over")
        assert process.wait(240) == 0, application.log("receiver")
    assert application.job().state is JobState.STOPPED
    (row,) = application.ledger.positions.all(application.stream.name)
    assert (row.partition.topic, row.next_offset) == ("lines", 1)
