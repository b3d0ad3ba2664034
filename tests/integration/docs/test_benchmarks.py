"""The benchmarks that the pages name exist and start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED = sorted(
    {
        name
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"python -m (benchmarks\.\w+)", page.read_text())
    }
    | {"benchmarks"}  # make bench
)


@pytest.mark.parametrize("name", NAMED)
def test_a_benchmark_that_the_pages_name_starts(name: str) -> None:
    subprocess.run([sys.executable, "-m", name, "--help"], cwd=ROOT, check=True, capture_output=True, timeout=120)


def test_the_pages_name_benchmarks() -> None:
    assert len(NAMED) > 3
