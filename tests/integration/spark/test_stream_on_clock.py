"""`headrace.testing.stream_on_clock` with the outputs written by Spark."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.integration.spark.test_transform_runs import DOCUMENT, ORDERS


def test_the_example_of_the_documentation(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = f"<!-- tested by {Path(__file__).relative_to(DOCUMENT.parents[1])} -->"
    (example,) = re.findall(rf"{re.escape(marker)}\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "orders.py").write_text(ORDERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)  # noqa: S102 - our own documentation
    (function,) = (function for name, function in names.items() if name.startswith("test_"))
    function(spark, tmp_path, capsys)
    sys.modules.pop("orders", None)
