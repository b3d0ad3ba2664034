"""All comparisons of headrace with the limits of its servers and with its peer, against their bounds: `make bench`.

    python -m benchmarks [--only receive --only index] [--rounds 3] [--json] [--write]

Each part is a benchmark of this folder in a process of its own; their figures are medians of several rounds. A figure
that misses its bound in ``bounds.json`` ends the run with exit code 1: bounds lie below what was measured by the noise
of a shared machine. ``--write`` puts the figures into ``results.json``, in place of the older ones of the same parts,
and makes the table and the plot of docs/performance.md of it. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.measures import Measure
from benchmarks.report import Row, print_rows, write_page

PARTS: dict[str, tuple[str, ...]] = {
    "receive": ("receiver_throughput", "--records", "2000000"),
    "receive-keyed": ("receiver_throughput", "--records", "1000000", "--shape", "keyed"),
    "receive-tiny": ("receiver_throughput", "--records", "3000000", "--shape", "tiny"),
    "receive-large": ("receiver_throughput", "--records", "10000", "--shape", "large"),
    "index": ("warm_batch", "--records", "500000", "--peer"),
    "index-transformed": ("warm_batch", "--records", "500000", "--peer", "--transform"),
    "small-batches": ("warm_batch", "--records", "1000"),
    "decode": ("decoding",),
    "scan": ("log_scan",),
    "idle": ("idle",),
    "recovery": ("recovery",),
    "restart": ("restart",),
    "latency": ("latency", "--minutes", "3"),
    "latency-single-task": ("latency", "--minutes", "3", "--single-task"),
}
# Benchmarks whose first round warms up, and does not count.
_WARMED_UP = {"warm_batch": "--batches", "log_scan": "--rounds"}
_BOUNDS = Path(__file__).with_name("bounds.json")
_RESULTS = Path(__file__).with_name("results.json")
_ROOT = Path(__file__).resolve().parents[1]


def run(part: str, rounds: int) -> list[Measure]:
    """The figures of a part. Raises CalledProcessError if it fails."""
    module, *arguments = PARTS[part]
    if module in _WARMED_UP:
        arguments += [_WARMED_UP[module], str(rounds + 1)]
    elif module != "latency":
        arguments += ["--rounds", str(rounds)]
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=_ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    # Before it stands what the processes of batches print.
    return [Measure.from_dict(fields) for fields in json.loads(done.stdout.strip().splitlines()[-1])]


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}. By default all.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="That count, of each part.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    write: Annotated[bool, typer.Option(help="Put them into docs/performance.md.")] = False,
) -> None:
    """Measure headrace beside its limits and its peer."""
    parts = only or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        raise typer.BadParameter(f"{', '.join(unknown)}: there is no such part. There are {', '.join(PARTS)}.")
    bounds: dict[str, dict[str, float]] = json.loads(_BOUNDS.read_text())
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {datetime.now(UTC):%Y-%m-%d}"
    rows: list[Row] = []
    failed: list[str] = []
    results: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    for number, part in enumerate(parts, 1):
        print(f"{part} ({number} of {len(parts)})", file=sys.stderr)
        try:
            measures = run(part, rounds)
        except subprocess.CalledProcessError as error:
            # The others count: together they take an hour.
            print(f"{part} failed: {error}", file=sys.stderr)
            failed.append(part)
            continue
        rows += [Row.of(measure, bounds) for measure in measures]
        results[part] = {"machine": machine, "figures": [asdict(measure) for measure in measures]}
        if write:
            # After each part: an hour's figures are not lost with the last one.
            in_order = {name: results[name] for name in PARTS if name in results}
            _RESULTS.write_text(json.dumps(in_order, indent=1) + "\n")
            kept = [Measure.from_dict(fields) for result in in_order.values() for fields in result["figures"]]
            write_page([Row.of(measure, bounds) for measure in kept], machine, _ROOT / "docs")
    missed = [row.name for row in rows if row.is_missed]
    if as_json:
        figures: list[dict[str, Any]] = [asdict(row.measure) | {"ratio": row.measure.ratio} for row in rows]
        print(json.dumps({"machine": machine, "figures": figures, "missed": missed, "failed": failed}))
    else:
        print_rows(rows)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. Missed bounds: {'; '.join(missed) or 'none'}.")
    if missed:
        sys.exit(f"Missed bounds: {'; '.join(missed)}.")


if __name__ == "__main__":
    typer.run(main)
