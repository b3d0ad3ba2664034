"""A test of one file starts quickly: it imports what it uses, and nothing for the tests of other files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOW_TO_IMPORT = ("airflow", "anyio", "hypothesis", "numpy", "pandas", "psycopg", "pyarrow", "pyspark", "sqlalchemy")


def test_one_file_imports_nothing_for_the_others() -> None:
    code = (
        "import sys, pytest; "
        "failed = pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/unit/test_clock.py']); "
        f"print('IMPORTED', *(name for name in {SLOW_TO_IMPORT} if name in sys.modules)); sys.exit(failed)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[-1] == "IMPORTED"
