"""The examples of a decoder and an output, built and installed as packages, in batches of a real Spark application."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pyarrow import parquet
from pyspark import cloudpickle
from tests.integration.spark.conftest import BatchLedger, records

from headrace.errors import FAILURE, Failure, HeadraceError
from headrace.spark.attempts.failures import AttemptFailedError
from headrace.stream import KafkaInput, OutputDefinition, SparkSettings, Stream, Utf8Decoder
from headrace.testing.extensions import ContractError, check_decoder, check_output
from headrace.testing.transforms import TransformTestError, run_transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
EXTENSIONS = ROOT / "examples" / "extensions"
DOCUMENT = ROOT / "docs" / "extending.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the packages are installed, built by their own build back end."""
    folder = tmp_path_factory.mktemp("installed")
    uv = Path(sys.executable).with_name("uv")
    options = ("--offline", "--no-deps", "--no-build-isolation", "--quiet", "--python", sys.executable)
    packages = [str(EXTENSIONS / name) for name in ("csv_decoder", "http_input", "ndjson_output")]
    subprocess.run([uv, "pip", "install", *options, "--target", folder, *packages], check=True)
    return folder


@pytest.fixture
def batch(
    installed: Path, make_batch_ledger: Callable[..., BatchLedger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> BatchLedger:
    """A stream with the decoder and the output, by the names of their kinds."""
    monkeypatch.syspath_prepend(installed)
    return make_batch_ledger(
        inputs=KafkaInput(
            bootstrap_servers="localhost:9092",
            topics="clicks",
            value_decoder={"kind": "csv_lines", "header": "carrier,flight"},
        ),
        outputs=({"kind": "ndjson", "path": str(tmp_path / "lines")},),
        spark=SparkSettings(master="local[2]"),
    )


def run(batch: BatchLedger, time_ms: int, path: Path | None, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the batch's command, as a task does, in an environment that has the packages of this folder installed."""
    command = [sys.executable, str(ROOT / "spark_jobs" / "micro_batch.py"), "--way", "submit", "--json"]
    command += ["--ledger", batch.stream.ledger, "--stream", "clicks", "--batch-time", str(time_ms), *more]
    paths = [str(each) for each in (path, os.environ.get("PYTHONPATH")) if each]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_other_packages_decoder_and_output_run_in_a_batch(batch: BatchLedger, installed: Path) -> None:
    batch.add(records([b"AA,1", b"BB", b'"C, C",2', None]))
    time_ms = batch.allocate()
    done = run(batch, time_ms, installed)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])["outputs"]["ndjson"]
    assert (counts["rows"], counts["undecodable"]) == (3, 1)
    path = Path(batch.stream.outputs[0].places[0].name) / f"{time_ms}.ndjson"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    values = [(row["offset"], row.get("value")) for row in rows]
    assert values == [(0, {"carrier": "AA", "flight": "1"}), (2, {"carrier": "C, C", "flight": "2"}), (3, None)]


def test_an_environment_names_the_extensions_that_it_lacks(batch: BatchLedger) -> None:
    batch.add(records([b"AA,1"]))
    done = run(batch, batch.allocate(), None)
    assert done.returncode == 1
    assert "has the kind 'csv_lines'" in done.stderr
    assert "entry point 'ndjson' in the group headrace.outputs" in done.stderr


def test_a_batch_that_runs_again_replaces_its_file(batch: BatchLedger, spark: Any, tmp_path: Path) -> None:
    # The rows are written by the process of the batch, so the shared session needs the output's package only here.
    stream = batch.stream.model_copy(update={"inputs": (KafkaInput(bootstrap_servers="x:1", topics="clicks"),)})
    batch.add(records([b"one", b"two"]))
    time_ms = batch.allocate()
    path = tmp_path / "lines" / f"{time_ms}.ndjson"
    first = batch.begin(time_ms)
    batch.run(spark, first, stream=stream)
    content, number = path.read_text(), path.stat().st_ino
    second = batch.begin(time_ms, force=True)
    batch.run(spark, second, stream=stream)
    assert second.number > first.number
    assert path.read_text() == content
    assert path.stat().st_ino != number
    assert [each.name for each in (tmp_path / "lines" / ".claims" / f"{time_ms}.").iterdir()] == [str(second.number)]


def test_the_example_of_the_documentation(
    installed: Path, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    # The workers of the shared session began without the packages.
    spark.sparkContext.addPyFile(str(EXTENSIONS / "csv_decoder" / "headrace_csv_lines.py"))
    marker = f"<!-- tested by {Path(__file__).relative_to(ROOT)} -->"
    (example,) = re.findall(rf"{re.escape(marker)}\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)  # noqa: S102 - our own documentation
    tests = {name: function for name, function in names.items() if name.startswith("test_")}
    assert len(tests) == 3
    for name, function in tests.items():
        given = {"spark": spark, "tmp_path": tmp_path / name}
        function(**{parameter: given[parameter] for parameter in inspect.signature(function).parameters})


def test_the_examples_keep_the_contract(
    installed: Path, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    spark.sparkContext.addPyFile(str(EXTENSIONS / "csv_decoder" / "headrace_csv_lines.py"))
    from headrace_csv import CsvDecoder
    from headrace_ndjson import NdjsonOutput

    def lines() -> list[str]:
        return sorted(file.read_text() for file in tmp_path.glob("lines/*.ndjson"))

    busy = TargetBusyError("away", remedy="Wait.")
    check_output(NdjsonOutput(path=f"{tmp_path}/lines"), read=lines, errors=[busy], spark=spark)
    assert '"value":"two"' in "".join(lines())
    check_decoder(CsvDecoder(header="carrier,flight"), ["AA,1", "BB,2"], refused=["CC"], spark=spark)
    with pytest.raises(
        ContractError, match="Of 1 values and a record without one, 3 are decoded; of 1 others, 0 are ref"
    ):
        check_decoder(CsvDecoder(header="carrier,flight"), ["AA,1"], refused=["BB,2"], spark=spark)


REGISTRY = """
from pathlib import Path
from typing import Literal
import pyarrow as pa
from headrace.stream import DecoderDefinition

class RegistryDecoder(DecoderDefinition):
    decodes = "house_registry:Named"
    keeps = True
    kind: Literal["registry"] = "registry"
    registry: str

    @property
    def column(self):
        return "STRING"

    @property
    def keywords(self):
        return {"registry": self.registry}

class Named:
    def __init__(self, kind, *, time_zone, registry, kept):
        self._registry, self._kept = Path(registry), kept

    def decode(self, values):
        return pa.array([value and self._name(value.decode()) for value in values.to_pylist()], pa.string()), {}

    def _name(self, number):
        return (self._kept.get(number) or self._kept.keep(number, (self._registry / number).read_bytes())).decode()
"""


def test_a_batch_that_runs_again_decodes_by_what_was_kept(
    make_batch_ledger: Callable[..., BatchLedger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "house" / "house_registry-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: house-registry\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[headrace.decoders]\nregistry = house_registry:RegistryDecoder\n")
    (package.parent / "house_registry.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(package.parent)
    registry = tmp_path / "registry"
    registry.mkdir()
    for number, name in (("1", "one"), ("2", "two")):
        (registry / number).write_text(name)
    batch = make_batch_ledger(
        inputs=KafkaInput(
            bootstrap_servers="localhost:9092",
            topics="clicks",
            value_decoder={"kind": "registry", "registry": str(registry)},
        ),
        outputs=({"kind": "parquet", "path": str(tmp_path / "rows")},),
        spark=SparkSettings(master="local[2]"),
    )
    batch.add(records([b"1", b"2", None, b"1"]))
    time_ms = batch.allocate()
    first = run(batch, time_ms, package.parent)
    assert first.returncode == 0, first.stderr
    # It was set up again, and answers otherwise; and one schema is gone.
    (registry / "1").write_text("another")
    (registry / "2").unlink()
    again = run(batch, time_ms, package.parent, "--force")
    assert again.returncode == 0, again.stderr
    rows = parquet.read_table(tmp_path / "rows").to_pylist()
    assert sorted((row["offset"], row["value"]) for row in rows) == [(0, "one"), (1, "two"), (2, None), (3, "one")]


STRANGER = """
from pathlib import Path
from typing import Literal
from headrace.stream import OutputDefinition

class AppendOutput(OutputDefinition):
    writer = "house_append:Writer"
    kind: Literal["append"] = "append"
    id: str = "append"
    path: str

class Writer:
    def __init__(self, output):
        self._output = output

    def write(self, frame, batch):
        rows = [] if frame is None else [row.value for row in frame.collect()]
        with Path(self._output.path).open("a") as file:
            file.writelines(f"{row}\\n" for row in rows)
        return {"rows": len(rows)}
"""


def test_an_output_that_doubles_a_repeat_breaks_the_contract(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house_append.py").write_text(STRANGER)
    package = tmp_path / "house_append-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: house-append\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[headrace.outputs]\nappend = house_append:AppendOutput\n")
    monkeypatch.syspath_prepend(tmp_path)
    from house_append import AppendOutput

    target = tmp_path / "target"
    with pytest.raises(ContractError, match="A second attempt at the same batch changed what the target holds"):
        check_output(AppendOutput(path=str(target)), read=target.read_text, spark=spark)
    with pytest.raises(ContractError, match="ValueError does not extend HeadraceError"):
        check_output(AppendOutput(path=str(target)), errors=[ValueError("x")], spark=spark)


class TargetBusyError(HeadraceError):
    """An extension's error, which an outage of its target raises."""


class RefusedError(HeadraceError):
    failure = Failure.CODE


class FailingOutput(OutputDefinition):
    """An output whose Spark tasks raise an error of its own."""

    writer = f"{__name__}:FailingWriter"
    kind: Literal["failing"] = "failing"
    id: str = "failing"
    how: Literal["mapInArrow", "foreachPartition", "wrapped", "refused"]


class FailingWriter:
    def __init__(self, output: FailingOutput) -> None:
        self._how = output.how

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        assert frame is not None
        how = self._how

        def fail(rows: Iterator[Any]) -> Iterator[Any]:
            for row in rows:
                if how == "refused":
                    raise RefusedError("no such target")
                try:
                    raise TargetBusyError("the target is away")
                except TargetBusyError as error:
                    if how == "wrapped":
                        raise ValueError("not put") from error
                    raise
                yield row

        if how == "foreachPartition":
            frame.foreachPartition(lambda rows: [*fail(iter(rows))] and None)
        else:
            frame.selectExpr("offset").mapInArrow(fail, "offset LONG").collect()
        return {}


@pytest.mark.parametrize(
    ("how", "failure"),
    [("mapInArrow", "passing"), ("foreachPartition", "passing"), ("wrapped", "passing"), ("refused", "code")],
)
def test_an_extensions_error_in_a_task_keeps_its_declared_kind(
    make_batch_ledger: Callable[..., BatchLedger], spark: Any, how: Any, failure: str
) -> None:
    batch = make_batch_ledger(outputs=FailingOutput(how=how))
    # Pickled by value, as the modules of a stream's code are: the workers have no such module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    batch.add(records([b"one"]))
    time_ms = batch.allocate()
    with pytest.raises(AttemptFailedError, match="not put" if how == "wrapped" else "target"):
        batch.run(spark, batch.begin(time_ms))
    (attempt,) = batch.ledger.attempts.of_batch("clicks", time_ms)
    assert attempt.attributes[FAILURE] == failure


class RecordingOutput(OutputDefinition):
    """An output whose counts are what its writer gets."""

    writer = f"{__name__}:RecordingWriter"
    keeps_undecodable = True
    kind: Literal["recording"] = "recording"
    id: str = "recording"


class RecordingWriter:
    def __init__(self, output: RecordingOutput) -> None:
        self._output = output

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        batch.progress(f"attempt {batch.attempt}")
        return {
            "rows": None if frame is None else [row.value for row in frame.collect()],
            "undecodable": [row.value for each in batch.undecodable().values() for row in each.collect()],
            "attempts": (batch.attempt, batch.context.attempt),
            "targets": (batch.target, batch.context.target),
            "written_before": batch.written_before,
        }


def test_a_run_in_a_test_gives_the_writer_what_an_attempt_gives(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = KafkaInput(bootstrap_servers="x:1", topics="clicks", value_decoder=Utf8Decoder())
    places = {"storage": tmp_path / "storage", "ledger": f"sqlite:///{tmp_path}/ledger.db"}
    stream = Stream(name="clicks", inputs=source, outputs=RecordingOutput(), batch_interval="10 s", **places)
    run = run_transform(stream, ["a", b"\xff", "b"], spark=spark, attempt=3)
    assert run.write() == {
        "rows": ["a", "b"],
        "undecodable": [b"\xff"],
        "attempts": (3, 3),
        "targets": ("", ""),
        "written_before": True,
    }
    first = run.write(attempt=1, target="v2")
    assert (first["attempts"], first["targets"], first["written_before"]) == ((1, 1), ("v2", "v2"), False)
    assert capsys.readouterr().out.splitlines() == ["attempt 3", "attempt 1"]
    assert run_transform(stream, [], spark=spark).write()["rows"] is None
    with pytest.raises(TransformTestError, match="Name one of its outputs"):
        run.write("another")
