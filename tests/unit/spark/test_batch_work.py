"""What an attempt says of the outputs that it may have written."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.elasticsearch.errors import ForeignDocumentsError
from headrace.spark import batch_work
from headrace.spark.batch_work import BatchWork, WorkStopped
from headrace.stream import ConsoleOutput, KafkaInput, Stream

OUTPUTS = ("first", "second", "third")


class Reading:
    spark = None

    def __init__(self, *_: Any) -> None:
        pass

    def undecodable(self, _: Any) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def incarnations(self, *_: Any) -> None:
        raise AssertionError("nobody asks")


class Frames:
    """An output named in ``broken`` has no rows: its transform fails."""

    broken: frozenset[str] = frozenset()

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def of(self, output: ConsoleOutput) -> str:
        if output.id in self.broken:
            raise ValueError("the transform said no")
        return "rows"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> BatchWork:
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=tuple(ConsoleOutput(id=name) for name in OUTPUTS),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    monkeypatch.setattr(batch_work, "BatchReading", Reading)
    monkeypatch.setattr(batch_work, "OutputFrames", Frames)
    monkeypatch.setattr(Frames, "broken", frozenset())
    plans: Any = [
        SimpleNamespace(output=output, skipped=None, needs_spark=True, fresh=(), origins=(), read=())
        for output in stream.outputs
    ]
    attempt: Any = SimpleNamespace(outputs=OUTPUTS, number=1, batch_time_ms=10_000, target="")
    own: Any = SimpleNamespace(manifest_uri="m", source="log")
    return BatchWork(
        stream=stream,
        attempt=attempt,
        own=own,
        leaving=(),
        plans=plans,
        parameters={},
        session=lambda: None,  # type: ignore[arg-type, return-value]
        new_scope=lambda _: None,  # type: ignore[arg-type, return-value]
        out=StringIO(),
        progress=lambda _: None,
    )


def write(monkeypatch: pytest.MonkeyPatch, errors: dict[str, BaseException]) -> None:
    """Have the writers of these outputs fail so."""

    class Writer:
        def __init__(self, output: ConsoleOutput) -> None:
            self.output = output

        def write(self, *_: Any) -> dict[str, int]:
            if error := errors.get(self.output.id):
                raise error
            return {"rows": 1}

    monkeypatch.setattr(batch_work, "writer_of", Writer)


def test_nothing_is_written_by_an_attempt_that_gets_no_session(
    work: BatchWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise ConnectionError("no Spark")

    monkeypatch.setattr(Reading, "spark", property(refused))
    with pytest.raises(ConnectionError):
        work.run(lambda *_: None)
    assert work.written == []


def test_what_was_begun_may_be_written_but_not_where_others_documents_were_met(
    work: BatchWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, {"first": ForeignDocumentsError("others"), "second": OSError("the executor died")})
    work.run(lambda *_: None)
    assert work.written == ["second", "third"]


def test_an_output_without_rows_or_that_was_not_begun_is_not_written(
    work: BatchWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Frames, "broken", frozenset({"first"}))
    write(monkeypatch, {})
    work.stopped = lambda: "second" in work.results
    with pytest.raises(WorkStopped):
        work.run(lambda *_: None)
    assert work.written == ["second"]
