"""What outputs read, by a real ledger of empty batches, and which of them earlier attempts may have written.

Windows with records are in the integration tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.records import TOPIC_ID

from headrace.batch.allocation import allocate
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.errors import Failure
from headrace.kafka.errors import RecordsDifferError
from headrace.ledger import EventKind, Ledger
from headrace.spark.attempts.batch_plan import (
    WRITTEN,
    UndeclaredInputError,
    WindowRemovedError,
    earlier_attempts,
    plan_attempt,
    plan_outputs,
    refuse_reused,
    tried_before,
    written_before,
)
from headrace.stream import ColumnIds, ConsoleOutput, ElasticsearchOutput, KafkaInput, State, Stream, Window
from headrace.stream_context import StreamContext

INTERVAL_MS = 10_000


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        yield ledger


def registered(ledger: Ledger, tmp_path: Path, batches: int, **fields: Any) -> Stream:
    stream = Stream(
        **{
            "name": "clicks",
            "inputs": KafkaInput(bootstrap_servers="localhost:9092", topics="clicks"),
            "outputs": ConsoleOutput(),
            "batch_interval": "10 s",
            "storage": str(tmp_path / "storage"),
            "ledger": f"sqlite:///{tmp_path}/ledger.db",
            **fields,
        }
    )
    ledger.streams.register(
        stream.name,
        stream.to_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
        outputs=stream.steps,
    )
    for number in range(1, batches + 1):
        allocate(StreamContext(stream, ledger), number * INTERVAL_MS)
    return stream


def times(origins: Any) -> list[int]:
    return [origin.batch_time_ms // INTERVAL_MS for origin in origins]


def test_an_output_without_a_window_reads_its_own_batch(ledger: Ledger, tmp_path: Path) -> None:
    stream = registered(ledger, tmp_path, 3)
    (plan,) = plan_outputs(StreamContext(stream, ledger), 2 * INTERVAL_MS, stream.steps)
    assert (times(plan.origins), times(plan.fresh)) == ([2], [2])
    assert (plan.skipped, plan.needs_spark) == (None, False)


def test_a_window_reads_only_the_batches_that_exist(ledger: Ledger, tmp_path: Path) -> None:
    stream = registered(ledger, tmp_path, 5, outputs=ConsoleOutput(window=Window(length="40 s", slide="20 s")))
    read = {
        number: plan_outputs(StreamContext(stream, ledger), number * INTERVAL_MS, stream.steps)[0]
        for number in range(1, 5)
    }
    assert times(read[2].origins) == [1, 2], "nothing was before the first"
    assert times(read[4].origins) == [1, 2, 3, 4]
    assert times(read[4].fresh) == [3, 4], "what no earlier window held"
    assert not read[2].skipped
    for number in (1, 3):
        assert read[number].skipped == "no window ends at this batch time, but every 20000 ms"
        assert not read[number].needs_spark


def test_a_window_over_removed_batches_is_only_for_a_first_run(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other run is refused."""
    stream = registered(ledger, tmp_path, 5, outputs=ConsoleOutput(window=Window(length="30 s")))
    row = replace(ledger.streams.get("clicks"), removed_from_ms=INTERVAL_MS, removed_until_ms=2 * INTERVAL_MS)
    fourth, fifth = (
        (
            ledger.attempts.begin("clicks", at, holder="test", way="connect", lease_ms=1),
            ledger.batches.get("clicks", at),
        )
        for at in (4 * INTERVAL_MS, 5 * INTERVAL_MS)
    )
    monkeypatch.setattr(type(ledger.streams), "get", lambda *_: row)
    attempt, batch = fourth
    for again in ((attempt, replace(batch, steps=("console",))), (replace(attempt, target="v2"), batch)):
        with pytest.raises(WindowRemovedError, match=r"up to 1970-01-01T00:00:20Z") as refused:
            plan_attempt(StreamContext(stream, ledger), *again)
        assert refused.value.failure is Failure.FINAL
    # A live batch may have a window that is new, and longer than what is kept.
    assert plan_attempt(StreamContext(stream, ledger), attempt, batch).outputs[0].skipped is None
    attempt, batch = fifth
    (plan,) = plan_attempt(StreamContext(stream, ledger), attempt, replace(batch, steps=("console",))).outputs
    assert times(plan.origins) == [3, 4, 5]


def test_undecodable_records_are_sought_between_windows_too(ledger: Ledger, tmp_path: Path) -> None:
    """They are sought in the batches between two windows."""
    stream = registered(ledger, tmp_path, 6, outputs=ConsoleOutput(window=Window(length="20 s", slide="30 s")))
    (plan,) = plan_outputs(StreamContext(stream, ledger), 3 * INTERVAL_MS, stream.steps)
    assert (times(plan.origins), times(plan.fresh)) == ([2, 3], [1, 2, 3])
    (plan,) = plan_outputs(StreamContext(stream, ledger), 6 * INTERVAL_MS, stream.steps)
    assert (times(plan.origins), times(plan.fresh)) == ([5, 6], [4, 5, 6])


def test_an_empty_batch_needs_spark_if_a_transform_makes_rows(ledger: Ledger, tmp_path: Path) -> None:
    """A transform can make rows without records."""
    by_record = ElasticsearchOutput(hosts="http://localhost:9200", index="clicks")
    by_column = ElasticsearchOutput(
        id="counts", hosts="http://localhost:9200", index="counts", document_ids=ColumnIds(columns=("word",))
    )
    stream = registered(ledger, tmp_path, 1, outputs=(by_record, by_column), transform="m:f")
    plans = plan_outputs(StreamContext(stream, ledger), INTERVAL_MS, stream.steps)
    assert [plan.needs_spark for plan in plans] == [False, True]
    untransformed = stream.model_copy(update={"transform": None})
    plans = plan_outputs(StreamContext(untransformed, ledger), INTERVAL_MS, stream.steps)
    assert not any(plan.needs_spark for plan in plans)


@pytest.fixture
def received(ledger: Ledger, tmp_path: Path) -> Stream:
    """A stream with a batch of seven records of its input "records"."""
    stream = registered(ledger, tmp_path, 0)
    job = ledger.jobs.acquire("clicks", holder="test", lease_ms=600_000)
    partition = TopicPartition("clicks", TOPIC_ID, 0)
    ledger.topics.observe(job, "records", [("clicks", TOPIC_ID, 1)])
    ledger.positions.ensure_all(job, "records", {partition: 0})
    ledger.positions.assign(job, "records", {partition: 0})
    receiver = ReceiverId("clicks", "records", 0)
    lease = ledger.receivers.register(ledger.receivers.schedule(job, receiver), host="h", lease_ms=600_000)
    handle = BlockHandle("log/records/0.wal", 0, 1)
    ranges = (OffsetRange(partition, 0, 7, 7),)
    ledger.blocks.add(lease, BlockInfo(receiver, lease.epoch, 0, INTERVAL_MS - 1, handle, ranges, 7, 1))
    return stream


@pytest.mark.parametrize(
    ("reused", "refused"),
    [
        pytest.param({"from_offset": 6, "until_offset": 9}, True, id="its last offset"),
        pytest.param({"from_offset": 7, "until_offset": 9}, False, id="later offsets"),
        pytest.param({"topic_id": "another"}, False, id="another topic of that name"),
        pytest.param({"partition": 1}, False, id="another partition"),
        pytest.param({"input": "another"}, False, id="another input"),
    ],
)
def test_a_batch_is_not_read_from_kafka_if_offsets_were_reused(
    ledger: Ledger, received: Stream, reused: dict[str, Any], refused: bool
) -> None:
    """Other records have its offsets now."""
    context = StreamContext(received, ledger)
    allocate(context, INTERVAL_MS)
    (in_log,) = ledger.batches.origins(received.name, [INTERVAL_MS]).values()
    in_kafka = replace(in_log, source="kafka")
    refuse_reused(context, [in_kafka])
    where = {"input": "records", "topic": "clicks", "topic_id": TOPIC_ID, "partition": 0}
    payload = {**where, "from_offset": 0, "until_offset": 9, "reason": "cut", **reused}
    ledger.events.append(received.name, EventKind.OFFSETS_REUSED, payload)
    # A week later other events are deleted.
    assert ledger.events.prune(received.name, ledger.now_ms() + 1_000) > 0
    refuse_reused(context, [in_log])
    expected = pytest.raises(RecordsDifferError, match=r"clicks-0 \[0, 7\) of batch 1970-01-01T00:00:10Z")
    with expected if refused else nullcontext():
        refuse_reused(context, [in_kafka])
    assert RecordsDifferError.failure is Failure.FINAL


@pytest.mark.parametrize("ids", [("clicks",), ("clicks", "records")])
def test_records_of_an_undeclared_input_are_not_dropped_silently(
    ledger: Ledger, tmp_path: Path, received: Stream, ids: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A receiver job goes on with the inputs with which it started."""
    inputs = [KafkaInput(id=id, bootstrap_servers="localhost:9092", topics=id) for id in ids]
    transform = "module:function" if len(ids) > 1 else None
    stream = registered(ledger, tmp_path, 0, inputs=inputs, transform=transform)
    context = StreamContext(stream, ledger)
    at_ms = ledger.blocks.unclaimed("clicks")[0].batch_time_ms
    allocate(context, at_ms)
    attempt = ledger.attempts.begin("clicks", at_ms, holder="test", way="connect", lease_ms=60_000)
    batch = ledger.batches.get("clicks", at_ms)
    if "records" in ids:
        assert times(plan_attempt(context, attempt, batch).outputs[0].origins) == [at_ms // INTERVAL_MS]
    else:
        with pytest.raises(UndeclaredInputError, match="has 7 records of the input 'records'") as refused:
            plan_attempt(context, attempt, batch)
        assert refused.value.failure is Failure.CODE
        # Written when the batch was completed; or a replay.
        for again in ((attempt, replace(batch, steps=("console",))), (replace(attempt, target="v2"), batch)):
            assert times(plan_attempt(context, *again).outputs[0].origins) == [at_ms // INTERVAL_MS]
        assert caplog.text.count("7 records of the input 'records' are left out of batch") == 2


def test_the_state_is_no_output(ledger: Ledger, tmp_path: Path) -> None:
    state = State(update="m:f", fields="word STRING, n INT", keys="word")
    stream = registered(ledger, tmp_path, 1, state=state)
    (plan,) = plan_outputs(StreamContext(stream, ledger), INTERVAL_MS, stream.steps)
    assert plan.output.id == "console"


def test_airflow_plans_without_pyspark() -> None:
    code = "import sys, headrace.spark.attempts.batch_plan; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def make_ledger(*rows: dict[str, Any], rebuilt_at_ms: int | None = None) -> Any:
    attempts = [
        SimpleNamespace(**{"number": number, "target": "", "outputs": ("a", "b"), "attributes": {}, **row})
        for number, row in enumerate(rows, 1)
    ]
    events = [] if rebuilt_at_ms is None else [SimpleNamespace(at_ms=rebuilt_at_ms)]
    return SimpleNamespace(
        attempts=SimpleNamespace(of_batch=lambda stream_name, batch_time_ms: attempts),
        events=SimpleNamespace(latest=lambda stream, kinds, limit: events),
    )


def make_attempt(target: str = "") -> Any:
    return SimpleNamespace(stream="s", batch_time_ms=10, number=9, target=target, outputs=("a", "c"))


def found(
    *rows: dict[str, Any],
    rebuilt_at_ms: int | None = None,
    target: str = "",
    window: str | None = None,
    built: bool = False,
) -> frozenset[str]:
    outputs = [SimpleNamespace(step=name, window="5 min" if name == window else None) for name in ("a", "b", "c")]
    stream: Any = SimpleNamespace(name="s", outputs=outputs)
    batch: Any = SimpleNamespace(allocated_at_ms=100, built=built)
    ledger = make_ledger(*rows, rebuilt_at_ms=rebuilt_at_ms)
    attempt = make_attempt(target)
    return written_before(StreamContext(stream, ledger), attempt, batch, earlier_attempts(ledger, attempt))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], set()),
        ([{}], {"a"}),
        ([{"outputs": ("b",)}], set()),
        ([{"outputs": ("c",)}], {"c"}),
        ([{"outputs": ("a", "c"), "attributes": {WRITTEN: ["a"]}}], {"a"}),
        ([{"attributes": {WRITTEN: []}}], set()),
        ([{"attributes": {WRITTEN: []}}, {"outputs": ("c",)}], {"c"}),
        ([{"target": "v2"}], set()),
        ([{"number": 9}], set()),
    ],
)
def test_an_earlier_attempt_at_the_output_may_have_written(rows: list[dict[str, Any]], expected: set[str]) -> None:
    assert found(*rows) == expected


def test_a_renamed_output_is_planned_by_its_first_id(ledger: Ledger, tmp_path: Path) -> None:
    stream = registered(ledger, tmp_path, 1)
    begun: dict[str, Any] = {"holder": "task", "way": "connect", "lease_ms": 60_000}
    ledger.attempts.fail(ledger.attempts.begin(stream.name, INTERVAL_MS, **begun), "half written")
    stream = registered(ledger, tmp_path, 0, outputs=ConsoleOutput(id="printed", renamed_from="console"))
    attempt = ledger.attempts.begin(stream.name, INTERVAL_MS, **begun)
    batch = ledger.batches.get(stream.name, INTERVAL_MS)
    (plan,) = plan_attempt(StreamContext(stream, ledger), attempt, batch).outputs
    assert (attempt.outputs, plan.output.id) == (("console",), "printed")
    assert (plan.written_before, plan.tried_before) == (True, True)


def test_a_rebuilt_ledger_has_no_attempts_of_earlier_batches() -> None:
    assert found(rebuilt_at_ms=100) == {"a", "c"}
    assert found(rebuilt_at_ms=99) == set()
    assert found(rebuilt_at_ms=100, target="v2") == set()


def test_a_built_batch_may_have_records_that_a_later_one_wrote() -> None:
    """It is built from Kafka, and the records were late."""
    assert found(built=True) == {"a", "c"}


def test_a_window_writes_records_of_earlier_batches_again() -> None:
    assert found(window="c") == {"c"}


def test_of_a_replay_only_its_own_attempts_count() -> None:
    assert found({}, target="v2") == set()
    assert found({"target": "v2"}, target="v2") == {"a"}


def test_dead_letters_may_be_left_by_every_earlier_attempt() -> None:
    """The attempts are those at the same output."""

    def tried(*rows: dict[str, Any]) -> frozenset[str]:
        attempt = make_attempt()
        return tried_before(attempt, earlier_attempts(make_ledger(*rows), attempt))

    failed: dict[str, Any] = {"attributes": {WRITTEN: []}}
    assert tried() == set()
    assert tried(failed) == {"a"}
    assert tried(failed, {"target": "v2", "outputs": ("c",)}) == {"a"}
    assert tried(*[{"outputs": ("b",)}] * 8, failed) == set()
