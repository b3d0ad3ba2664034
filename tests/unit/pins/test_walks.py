"""The files that somebody reads who follows a batch, a receiver, a recovery, a replay, the page, or cleanup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.pins.freezing import frozen

ROOT = Path(__file__).parents[3]


def test_files_of_walks(tmp_path: Path) -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "HEADRACE"))}
    settings = {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__HEADRACE__SECRET_KEY": "k" * 32}
    walks = subprocess.run(
        [sys.executable, "-m", "tests.unit.pins.walks", tmp_path / "walks.json"],
        check=False, cwd=ROOT, env=given | settings, capture_output=True, text=True,
    )  # fmt: skip
    assert walks.returncode == 0, walks.stdout + walks.stderr
    entered = json.loads((tmp_path / "walks.json").read_text(encoding="utf-8"))
    walks_of: dict[str, list[str]] = {}
    for name, files in entered.items():
        for file in files:
            walks_of.setdefault(file, []).append(name)
    lines = [f"{name}: {len(files)} files" for name, files in entered.items()]
    lines += [f"{file}: {', '.join(names)}" for file, names in sorted(walks_of.items())]
    frozen("walks.txt", "".join(f"{line}\n" for line in lines))
