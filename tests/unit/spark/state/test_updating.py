"""Updates of a state without Spark: its columns, what is refused, and what leaves a window."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.spark.attempts.batch_plan import evicted_batches
from headrace.spark.records.transforms import TransformError, check_transform
from headrace.spark.state import updating
from headrace.spark.state.updating import check_returned, check_stored, has_map, update_state
from headrace.spark.state.version import (
    DATA,
    Outcome,
    StateDefinitionError,
    StateRowsError,
    StateStore,
    StoredFile,
    Version,
    WriteReport,
    stem,
)
from headrace.stream import ConsoleOutput, KafkaInput, SparkSettings, State, Stream
from headrace.stream.model import StreamDefinitionError
from headrace.stream_context import StreamContext

from .conftest import FIRST_MS, INTERVAL_MS, Versions

FUNCTIONS = """
def update(lines, state, leaving, timing_out, batch): ...
def leaves(lines, leaving): ...
def times_out(lines, timing_out): ...
def changed(lines, changes): ...
def other(lines, table): ...
"""


@pytest.fixture
def make_stream(tmp_path: Path) -> Callable[..., Stream]:
    name = f"functions_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    return lambda update, **state: Stream(
        name="lines",
        inputs=KafkaInput(id="lines", bootstrap_servers="127.0.0.1:1", topics="lines"),
        outputs=ConsoleOutput(transform=f"{name}:changed"),
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        state=State(
            update=f"{name}:{update}",
            fields="word STRING",
            keys="word",
            **{key: value.replace("functions", name) for key, value in state.items()},
        ),
        spark=SparkSettings(py_files=(str(tmp_path / f"{name}.py"),)),
    )


def test_an_update_may_take_all_that_there_is(make_stream: Callable[..., Stream]) -> None:
    check_transform(make_stream("update", window="30 s", timeout="60 s"))


@pytest.mark.parametrize(("update", "declared"), [("leaves", {"window": "30 s"}), ("times_out", {"timeout": "60 s"})])
def test_an_update_takes_leaving_and_timing_out_only_if_set(
    make_stream: Callable[..., Stream], update: str, declared: dict[str, Any]
) -> None:
    """Leaving needs a window, and timing out needs a timeout."""
    check_transform(make_stream(update, **declared))
    with pytest.raises(TransformError, match=r"takes \(lines, (leaving|timing_out)\)"):
        check_transform(make_stream(update))


def test_a_missing_function_of_the_initial_table_is_refused(make_stream: Callable[..., Stream]) -> None:
    check_transform(make_stream("leaves", window="30 s", initial="functions:other"))
    with pytest.raises(StreamDefinitionError, match="no 'missing' to be the state's initial table"):
        check_transform(make_stream("leaves", window="30 s", initial="functions:missing"))


def test_an_update_with_wrong_parameters_is_refused_at_first(
    make_stream: Callable[..., Stream],
) -> None:
    """It is refused before the first batch."""
    with pytest.raises(TransformError, match=r"takes \(lines, table\)"):
        check_transform(make_stream("other"))


def test_a_missing_update_function_is_refused(make_stream: Callable[..., Stream]) -> None:
    with pytest.raises(StreamDefinitionError, match="no 'missing' to be the state's update"):
        check_transform(make_stream("missing"))


def columns(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


COUNTS = columns(word=StringType(), count=LongType())


@pytest.mark.parametrize(
    "returned",
    [
        COUNTS,
        columns(count=LongType(), word=StringType()),
        columns(word=StringType(), count=IntegerType()),
        StructType([StructField("word", StringType(), nullable=False), StructField("count", LongType())]),
    ],
)
def test_the_fields_in_any_order_are_taken(returned: StructType) -> None:
    check_returned(returned, COUNTS, may_remove=False)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (columns(word=StringType()), "count is missing"),
        (columns(word=StringType(), count=StringType()), "count is string and not bigint"),
        (columns(word=StringType(), count=LongType(), more=LongType()), "more is not one of the fields"),
        (columns(word=StringType(), count=LongType(), removed=BooleanType()), "removed is not one of the fields"),
        (StructType([*COUNTS.fields, StructField("word", StringType())]), "word occurs twice"),
    ],
)
def test_other_columns_are_refused_by_name(returned: StructType, message: str) -> None:
    with pytest.raises(StateRowsError, match=f"{message}.*Select and cast"):
        check_returned(returned, COUNTS, may_remove=False)


def test_changes_may_say_which_keys_go() -> None:
    check_returned(columns(word=StringType(), count=LongType(), removed=BooleanType()), COUNTS, may_remove=True)
    with pytest.raises(StateRowsError, match="removed is string and not boolean"):
        check_returned(columns(word=StringType(), count=LongType(), removed=StringType()), COUNTS, may_remove=True)


def test_a_column_may_be_added_and_a_number_widened(versions: Any) -> None:
    stored = versions.update(0, added=1)
    check_stored(stored, COUNTS, ("word",))
    check_stored(stored, columns(word=StringType(), count=LongType(), seen=LongType()), ("word",))
    narrow = columns(word=StringType(), count=IntegerType())
    check_stored(replace(stored, schema=narrow.jsonValue()), COUNTS, ("word",))


@pytest.mark.parametrize(
    ("declared", "keys", "message"),
    [
        (columns(word=StringType()), ("word",), "the column count is gone"),
        (columns(word=StringType(), count=StringType()), ("word",), "the column count was bigint and is string"),
        (columns(word=StringType(), count=IntegerType()), ("word",), "the column count was bigint and is int"),
        (COUNTS, ("word", "count"), "the keys were word and are word, count"),
    ],
)
def test_other_definition_changes_are_refused_with_a_remedy(
    versions: Any, declared: StructType, keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StateDefinitionError, match=f"{message}.*delete the folder state/"):
        check_stored(versions.update(0, added=1), declared, keys)


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        (StringType(), False),
        (ArrayType(StringType()), False),
        (MapType(StringType(), LongType()), True),
        (ArrayType(columns(inner=MapType(StringType(), LongType()))), True),
    ],
)
def test_maps_are_found_wherever_they_are(kind: DataType, has: bool) -> None:
    assert has_map(kind) is has


class Windowed:
    """A stream with a state over the last two batches; `run` and `give_up` are told a batch by its number, from 0."""

    def __init__(self, folder: Path) -> None:
        self.stream = Stream(
            name="words",
            inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="words"),
            outputs=ConsoleOutput(),
            state=State(update="m:f", fields="word STRING, count BIGINT", keys="word", window="20 s"),
            batch_interval="10 s",
            storage=folder / "storage",
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        clock = ManualClock(FIRST_MS - INTERVAL_MS)
        self.ledger = Ledger.open(self.stream.ledger, clock=clock)
        self.ledger.streams.register(
            "words", self.stream.to_json(), batch_interval_ms=INTERVAL_MS, block_interval_ms=200,
            outputs=self.stream.steps, ordered=True,
        )  # fmt: skip
        clock.advance(100 * INTERVAL_MS)
        self.store = StateStore.of(self.stream)
        self.versions = Versions(self.store)

    def time_ms(self, batch: int) -> int:
        return FIRST_MS + batch * INTERVAL_MS

    def run(self, *batches: int) -> None:
        for batch in batches:
            attempt = self._begin(batch)
            self.versions.update(batch, added=1, attempt=attempt.number)
            for step in attempt.outputs:
                self.ledger.attempts.record_output(attempt, step, {})
            self.ledger.attempts.complete(attempt)

    def give_up(self, batch: int, *, updated: bool, recorded: bool = True) -> None:
        attempt = self._begin(batch)
        if updated:
            self.versions.update(batch, added=1, attempt=attempt.number)
            if recorded:
                self.ledger.attempts.record_output(attempt, "state", {})
        self.ledger.attempts.fail(attempt, "the output cannot be written")
        self.ledger.batches.abandon("words", self.time_ms(batch), "never")

    def leaving(self, batch: int) -> list[int]:
        evicted = evicted_batches(StreamContext(self.stream, self.ledger), self.time_ms(batch))
        return [(origin.batch_time_ms - FIRST_MS) // INTERVAL_MS for origin in evicted]

    def _begin(self, batch: int) -> Attempt:
        self.ledger.allocations.allocate("words", self.time_ms(batch), manifest_uri="m", manifest_sha256="0")
        return self.ledger.attempts.begin("words", self.time_ms(batch), holder="test", way="submit", lease_ms=60_000)


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[Windowed]:
    made = Windowed(tmp_path)
    yield made
    made.ledger.close()


def test_the_batch_that_leaves_the_window_leaves(windowed: Windowed) -> None:
    windowed.run(0, 1)
    assert (windowed.leaving(1), windowed.leaving(2)) == ([], [0])


@pytest.mark.parametrize("recorded", [True, False])
def test_an_abandoned_batch_leaves_if_later_ones_build_on_it(windowed: Windowed, recorded: bool) -> None:
    windowed.run(0)
    windowed.give_up(1, updated=True, recorded=recorded)
    assert windowed.leaving(3) == [0, 1], "what batch 3 would start from is batch 1's own table"
    windowed.run(2)
    assert windowed.leaving(3) == [1]


def test_an_abandoned_batch_never_in_the_table_does_not_leave(windowed: Windowed) -> None:
    windowed.run(0)
    windowed.give_up(1, updated=False)
    windowed.run(2)
    assert windowed.leaving(3) == []
    assert windowed.leaving(4) == [2]


def test_the_ledger_decides_about_a_batch_with_a_pruned_version(windowed: Windowed) -> None:
    windowed.versions.snapshot_every = 1
    windowed.run(0)
    windowed.give_up(1, updated=True)
    windowed.run(2)
    windowed.store.prune(windowed.time_ms(3))
    assert [name.batch_time_ms for name in windowed.store.names()] == [windowed.time_ms(2)]
    assert windowed.leaving(3) == [1]


PAGE = Path(__file__).parents[4] / "docs" / "state.md"


def test_every_field_of_a_state_is_documented() -> None:
    text = PAGE.read_text()
    assert [name for name in State.model_fields if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("corrected", ["other rows", "no initial table"])
def test_a_corrected_initial_table_is_used_after_a_failed_batch(
    make_stream: Callable[..., Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrected: str
) -> None:
    """The first batch has failed, and the one before as well."""
    stream = make_stream("update", initial="functions:other")
    store = StateStore.of(stream)
    rows = iter((1, 2, 3, 4, 5))
    ran: list[Version | None] = []

    def save(self: Any, _rows: Any, batch_time_ms: int, attempt: int) -> WriteReport:
        added = next(rows)
        file = StoredFile(f"{DATA}/{stem(batch_time_ms, attempt)}-{added}.parquet", added, 1)
        store.storage.write_atomically(file.path, b"rows")
        return WriteReport([file], Counter({Outcome.ADDED: added}))

    def run(self: Any, base: Version | None, *_: Any) -> Any:
        ran.append(base)
        if len(ran) < 3:
            raise StateRowsError("the first table is wrong")
        return self._write(base, None, self.batch.batch_time_ms, self.batch.attempt)

    columns = StructType([StructField("word", StringType())])
    for name, stub in {
        "register_source": lambda *_: None,
        "declared_columns": lambda *_: columns,
        "load_function": lambda *_: lambda _: SimpleNamespace(schema=columns),
        "_check_frame": lambda *_: None,
        "changed_rows": lambda *_, **__: None,
    }.items():
        monkeypatch.setattr(updating, name, stub)
    for name, stub in {"_table": lambda *_: None, "_save": save, "run": run}.items():
        monkeypatch.setattr(updating._Update, name, stub)

    def attempt(number: int, batch: int = 0) -> None:
        written: Any = SimpleNamespace(
            target="", batch_time_ms=FIRST_MS + batch * INTERVAL_MS, attempt=number, progress=lambda _: None
        )
        update_state(cast("Any", None), stream, {}, written)

    for number in (1, 2):
        with pytest.raises(StateRowsError):
            attempt(number)
    has_initial = corrected == "other rows"
    if not has_initial:
        stream = make_stream("update")
    dropped, last = store.storage.paths(DATA)
    attempt(3)
    assert last in store.storage.paths(DATA), "an attempt that began meanwhile may read it"
    assert dropped not in store.storage.paths(DATA)
    attempt(4, batch=1)
    assert [base and base.rows for base in ran] == ([1, 2, 3, 7] if has_initial else [1, 2, None, 3])
    times = [FIRST_MS + n * INTERVAL_MS for n in ((-1, 0, 1) if has_initial else (0, 1))]
    assert [name.batch_time_ms for name in store.names()] == times
