"""The documentation's example, over Spark Connect."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "state.md"

SERVER = """
import sys
from headrace.spark.receiver_application import start_application
from headrace.stream import Stream

application = start_application(Stream.model_validate_json(sys.argv[1]), token="state-test")
print(application.connect_url, flush=True)
sys.stdin.read()
application.spark.stop()
"""

CLIENT = """
import json, sys
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.sessions import connect_session
from headrace.spark.state import state_frames, update_state
from headrace.spark.transforms import BatchContext, apply_transform, load_transform
from headrace.stream import Stream

stream = Stream.model_validate_json(sys.argv[1])
spark = connect_session(sys.argv[2], "state-test")
for number, lines in enumerate((["a b", "a"], [], ["b b", "c"])):
    time_ms = 1_700_000_000_000 + number * 10_000
    context = BatchContext.of(stream.name, time_ms, 10_000, 1)
    batch = WrittenBatch(stream, context, time_ms, 1, "", False, "", {}, sys.stdout, lambda line: None)
    inputs = {"lines": spark.createDataFrame([(line,) for line in lines], "value STRING")}
    counts = update_state(spark, stream, inputs, batch)
    frames = state_frames(spark, stream, time_ms)
    more = {"state": frames.state, "changes": frames.changes}
    written = apply_transform(load_transform(stream), inputs, ["elasticsearch"], context, more=more)
    rows = {row["word"]: row["count"] for row in written["elasticsearch"].collect()}
    print(json.dumps([counts, {row["word"]: row["count"] for row in frames.state.collect()}, rows]))
spark.stop()
"""


@pytest.mark.slow
def test_the_documentations_example_runs_over_spark_connect(tmp_path: Path) -> None:
    functions, dag = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[:2]
    (tmp_path / "running_count_functions.py").write_text(functions)
    (tmp_path / "running_count.py").write_text(dag.replace("/var/lib/headrace", str(tmp_path)))
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "running_count.py"), "__name__": "running_count"}
    exec(compile((tmp_path / "running_count.py").read_text(), "running_count.py", "exec"), namespace)  # noqa: S102
    definition = namespace["stream"].to_json()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_CONNECT")}
    with (
        (tmp_path / "server.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", SERVER, definition],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as server,
    ):
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            assert url, (tmp_path / "server.log").read_text()[-3000:]
            client = subprocess.run(
                [sys.executable, "-c", CLIENT, definition, url],
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
                env=environment,
            )
        finally:
            assert server.stdin is not None
            server.stdin.close()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    assert client.returncode == 0, client.stderr[-3000:]
    batches = [json.loads(line) for line in client.stdout.splitlines()]
    assert [counts["rows"] for counts, _, _ in batches] == [2, 2, 3]
    assert [state for _, state, _ in batches] == [{"a": 2, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 3, "c": 1}]
    assert [written for _, _, written in batches] == [{"a": 2, "b": 1}, {}, {"b": 3, "c": 1}]
