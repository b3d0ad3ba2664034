"""What a benchmark has measured: headrace beside a limit or a peer, several times, in one run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self


@contextmanager
def bench_folder() -> Iterator[Path]:
    """A folder for what a benchmark leaves, deleted afterwards. Postgres may enter, which under root runs as nobody."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


Unit = Literal["records/s", "s", "CPU s per million records", "of a core", "MiB", "batches", "files", "threads"]


@dataclass(frozen=True)
class Speed:
    """The machine's speed, by work that is the same everywhere: the MB/s of SHA-256 in one thread, and the milliseconds
    of an fdatasync after 4 KiB in the folder of temporary files."""

    sha256_mb: float
    fdatasync_ms: float

    @classmethod
    def measured(cls) -> Self:
        """Measure it; takes about a second."""
        block = bytes(1 << 20)
        seconds = [_seconds(lambda: hashlib.sha256(block).digest()) for _ in range(200)]
        with tempfile.TemporaryFile() as file:

            def sync() -> None:
                os.write(file.fileno(), block[: 4 << 10])
                os.fdatasync(file.fileno())

            syncs = [_seconds(sync) for _ in range(100)]
        return cls(len(block) / 1e6 / statistics.median(seconds), statistics.median(syncs) * 1000)

    def __str__(self) -> str:
        return f"SHA-256 {shown(self.sha256_mb)} MB/s, fdatasync {shown(self.fdatasync_ms)} ms"


@dataclass(frozen=True)
class Measure:
    """One figure of each round, and what stands beside it in the same round.

    ``ratios`` are the figures relative to ``others``. In a rate more is better; of seconds, less. ``speed`` is the
    machine's in the same run, None in results from before it was measured.
    """

    name: str
    unit: Unit
    figures: tuple[float, ...]
    other: str
    others: tuple[float, ...]
    speed: Speed | None = None

    @property
    def ratios(self) -> list[float]:
        return [mine / other for mine, other in zip(self.figures, self.others, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def more_is_better(self) -> bool:
        return self.unit == "records/s"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        speed = fields.get("speed")
        lists = {name: tuple(fields[name]) for name in ("figures", "others")}
        return cls(**{**fields, **lists, "speed": None if speed is None else Speed(**speed)})

    def line(self) -> str:
        mine, other = statistics.median(self.figures), statistics.median(self.others)
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f} in {len(self.ratios)} rounds"
        return (
            f"{self.name}: {shown(mine)} {self.unit}; {self.other}: {shown(other)}; ratio {self.ratio:.2f} ({spread})"
        )


def shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def print_measures(measures: list[Measure], *, as_json: bool) -> None:
    """Print a line for each, or all as one line of JSON, for `python -m benchmarks`; and the machine's speed."""
    speed = Speed.measured()
    if as_json:
        print(json.dumps([asdict(replace(each, speed=speed)) for each in measures]))
    else:
        for each in measures:
            print(each.line())
        print(f"This machine: {speed}")


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
