"""The documentation's example, over Spark Connect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.spark.connect_server import connect_server

PAGE = Path(__file__).parents[4] / "docs" / "state.md"

CLIENT = """
import json, sys
from headrace.spark.outputs.writer import (WrittenBatch)
from headrace.spark.sessions import connect_session
from headrace.spark.state.updating import state_frames
from headrace.spark.state.updating import update_state
from headrace.spark.transforms import BatchContext, apply_transform, load_transform
from headrace.stream import Stream

url, token, definition = sys.argv[1:]
stream = Stream.from_json(definition)
spark = connect_session(url, token)
for number, lines in enumerate((["a b", "a"], [], ["b b", "c"])):
    time_ms = 1_700_000_000_000 + number * 10_000
    context = BatchContext.of(stream.name, time_ms, 10_000, 1)
    batch = WrittenBatch(stream, context, time_ms, 1, "", False, "", sys.stdout, lambda line: None)
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
    with connect_server(definition, tmp_path) as server:
        client = server.run(CLIENT, definition, seconds=240)
    batches = [json.loads(line) for line in client.stdout.splitlines()]
    assert [counts["rows"] for counts, _, _ in batches] == [2, 2, 3]
    assert [state for _, state, _ in batches] == [{"a": 2, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 3, "c": 1}]
    assert [written for _, _, written in batches] == [{"a": 2, "b": 1}, {}, {"b": 3, "c": 1}]
