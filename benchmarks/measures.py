"""What a benchmark has measured: headrace beside a limit or a peer, several times, in one run."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

Unit = Literal["records/s", "s", "CPU s per million records", "of a core", "MiB", "batches", "files", "threads"]


@dataclass(frozen=True)
class Measure:
    """One figure of each round, and what stands beside it in the same round.

    ``ratios`` are the figures relative to ``others``. In a rate more is better; of seconds, less.
    """

    name: str
    unit: Unit
    figures: tuple[float, ...]
    other: str
    others: tuple[float, ...]

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
        return cls(**{**fields, "figures": tuple(fields["figures"]), "others": tuple(fields["others"])})

    def line(self) -> str:
        mine, other = statistics.median(self.figures), statistics.median(self.others)
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f} in {len(self.ratios)} rounds"
        return (
            f"{self.name}: {shown(mine)} {self.unit}; {self.other}: {shown(other)}; ratio {self.ratio:.2f} ({spread})"
        )


def shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def print_measures(measures: list[Measure], *, as_json: bool) -> None:
    """Print a line for each, or all as one line of JSON, which `python -m benchmarks` reads."""
    if as_json:
        print(json.dumps([asdict(each) for each in measures]))
    else:
        for each in measures:
            print(each.line())
