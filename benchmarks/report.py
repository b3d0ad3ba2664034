"""The benchmarks' figures for a reader: as a table on the console, and as a table and a plot in docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.measures import Measure, shown
from rich.console import Console
from rich.table import Table

BEGIN, END = "<!-- made by `make bench`: begin -->", "<!-- made by `make bench`: end -->"
PLOT = Path("images") / "performance.svg"
HEADINGS = ("what", "headrace", "beside it", "", "ratio", "spread", "goal", "the machine")


@dataclass(frozen=True)
class Row:
    """A figure with its goal, and the bound that it must not miss; both are ratios."""

    measure: Measure
    goal: float | None
    bound: float | None

    @classmethod
    def of(cls, measure: Measure, bounds: Mapping[str, Mapping[str, float]]) -> Self:
        found = bounds.get(f"{measure.name} / {measure.other}", {})
        return cls(measure, found.get("goal"), found.get("bound"))

    @property
    def name(self) -> str:
        return f"{self.measure.name} / {self.measure.other}"

    @property
    def is_missed(self) -> bool:
        if self.bound is None:
            return False
        ratio = self.measure.ratio
        return ratio < self.bound if self.measure.more_is_better else ratio > self.bound

    def cells(self) -> tuple[str, ...]:
        measure = self.measure
        mine, other = sorted(measure.figures), sorted(measure.others)
        most = "at least" if measure.more_is_better else "at most"
        return (
            measure.name,
            f"{shown(mine[len(mine) // 2])} {measure.unit}",
            measure.other,
            shown(other[len(other) // 2]),
            f"{measure.ratio:.2f}",
            f"{min(measure.ratios):.2f} to {max(measure.ratios):.2f}" if len(measure.ratios) > 1 else "one round",
            f"{most} {self.goal:g}" if self.goal is not None else "",
            "" if measure.speed is None else str(measure.speed),
        )


def print_rows(rows: Sequence[Row]) -> None:
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*row.cells(), style="red" if row.is_missed else None)
    Console().print(table)


def write_page(rows: Sequence[Row], machine: str, docs: Path) -> None:
    """Replace the table and the plot between the marks in performance.md."""
    page = docs / "performance.md"
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *[r.cells() for r in rows])]
    text = f"Medians of several rounds, on {machine}:"
    plot = f"![The ratios of the table: median, spread and goal]({PLOT})"
    page.write_text("\n".join([f"{before}{BEGIN}", "", text, "", *lines, "", plot, "", f"{END}{after}"]))
    draw(rows, docs / PLOT)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A bar for each ratio, with its spread and its goal; logarithmic, since 0.5 and 2 are equally far from 1."""
    import matplotlib as mpl

    mpl.use("svg")
    # So that the same figures make the same file.
    mpl.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(rows) + 1.2), layout="constrained")
    for place, row in enumerate(rows):
        ratio, ratios = row.measure.ratio, row.measure.ratios
        color = "#3367a6" if row.measure.more_is_better else "#a66a33"
        axes.barh(place, ratio - 1, left=1, color=color, height=0.6)
        axes.plot([min(ratios), max(ratios)], [place, place], color="black", linewidth=1.2)
        if row.goal is not None:
            axes.plot([row.goal, row.goal], [place - 0.4, place + 0.4], color="#c62828", linewidth=2)
    axes.set_xscale("log")
    ticks = [0.2, 0.5, 1, 2, 5, 10]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks(range(len(rows)), [f"{row.measure.name}\nbeside {row.measure.other}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("ratio (blue: more is better; brown: less is better; red mark: goal; line: spread)", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
