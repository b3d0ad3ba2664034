"""The report of the flights demo, as tables for people and as JSON for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from examples.demo.proof import Proof
from examples.demo.timings import BatchTiming, by_step
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Report:
    """The proof, the batches' times, and the seconds that each part of the demo took."""

    proof: Proof
    malformed: Mapping[str, int]
    """Records damaged on purpose, by the kind of damage."""
    batches: int
    timings: Sequence[BatchTiming]
    seconds: Mapping[str, float]

    @property
    def holds(self) -> bool:
        """Whether the proof holds."""
        return self.proof.holds

    @property
    def median_seconds(self) -> float | None:
        """Seconds from a batch time to the end of the batch's last task, median over the batches with records."""
        return round(median(one.total for one in self.timings), 3) if self.timings else None

    @property
    def worst_seconds(self) -> float | None:
        """The same for the slowest batch."""
        return max((one.total for one in self.timings), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON object."""
        proof = self.proof
        return {
            "holds": proof.holds,
            "records": proof.produced,
            "held_by_kafka": proof.held,
            "read_again": proof.read,
            **proof.counts(),
            "problems": list(proof.problems()),
            "malformed": dict(self.malformed),
            "batches": {
                "count": self.batches,
                "median_seconds": self.median_seconds,
                "worst_seconds": self.worst_seconds,
                "steps": [asdict(step) for step in by_step(self.timings)],
            },
            "seconds": dict(self.seconds),
        }

    def print(self, console: Console) -> None:
        """Print the report for people."""
        console.print(_result(self))
        if self.timings:
            console.print(_steps(self))
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        console.print(f"Time: {parts}", highlight=False, style="dim", soft_wrap=True)
        if self.holds:
            console.print("[bold green]Proved:[/] every record is there exactly once, unchanged, where it belongs.")
            return
        console.print("[bold red]The proof fails:[/]")
        for problem in self.proof.problems():
            console.print(f"  {problem}", markup=False, highlight=False, soft_wrap=True)


def _result(report: Report) -> Table:
    proof = report.proof
    table = Table("what", "count", "how it was found", title="From Kafka to Elasticsearch, counted from outside")
    table.columns[1].justify = "right"
    rows = [
        ("records", proof.produced, "acknowledged to the producer"),
        ("in Kafka", proof.held, "end offsets less first offsets"),
        ("read again", proof.read, "by a plain consumer"),
        ("in the index", proof.indexed, "each _source compared with its record"),
        (
            "dead letters",
            proof.dead_lettered,
            f"{sum(report.malformed.values())} were damaged on purpose; bytes compared",
        ),
        ("lost", len(proof.lost), "in neither"),
        ("doubled", len(proof.doubled), "more than once in both together"),
        ("changed", len(proof.changed), "other than what was produced"),
        ("misjudged", len(proof.misjudged), "in the wrong one of the two"),
        ("unknown", len(proof.unknown), "documents without a record"),
    ]
    for name, count, how in rows:
        bad = name in ("lost", "doubled", "changed", "misjudged", "unknown") and count
        table.add_row(name, f"{count:,}", how, style="red" if bad else None)
    table.add_section()
    table.add_row("batches", f"{report.batches:,}", "with records, completed, checkpointed and cleaned up")
    if report.median_seconds is not None and report.worst_seconds is not None:
        table.add_row(
            "median batch", f"{report.median_seconds:.1f} s", "from its batch time to the end of its last task"
        )
        table.add_row("worst batch", f"{report.worst_seconds:.1f} s", "")
    return table


def _steps(report: Report) -> Table:
    table = Table("step", "median", "worst", "share", title="Where a batch's time went, by Airflow's account")
    for column in table.columns[1:]:
        column.justify = "right"
    for step in by_step(report.timings):
        table.add_row(step.step, f"{step.median:.2f} s", f"{step.worst:.2f} s", f"{step.share:.0%}")
    return table
