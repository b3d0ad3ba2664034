"""What the hammer found, as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from tests.hammer.judgement import Judgement, by_kind


def print_judgement(judgement: Judgement, console: Console) -> None:
    """The faults, the records and the verdict."""
    console.print(_faults(judgement))
    console.print(_records(judgement))
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in judgement.seconds.items())
    console.print(f"Time: {parts}", highlight=False, soft_wrap=True)
    for text in judgement.not_possible:
        console.print(f"Not tried here: {text}", markup=False, highlight=False, soft_wrap=True)
    if judgement.holds:
        console.print(f"[bold green]Held:[/] nothing lost, nothing doubled, all batches done (seed {judgement.seed}).")
        return
    console.print(f"[bold red]Did not hold[/] (seed {judgement.seed}):")
    for problem in judgement.problems():
        console.print(f"  {problem}", markup=False, highlight=False, soft_wrap=True)


def _faults(judgement: Judgement) -> Table:
    table = Table("fault", "hit", "missed", title=f"Faults injected, seed {judgement.seed}")
    counts = by_kind(judgement.injections)
    for kind, one in counts["kinds"].items():
        table.add_row(kind, str(one["hit"]), str(one["missed"] or ""), style="red" if one["missed"] else None)
    table.add_section()
    table.add_row("all", str(counts["hit"]), str(counts["missed"]))
    for server, times in judgement.collateral.items():
        table.add_row(f"{server} ended by itself", str(times), "", style="dim")
    return table


def _records(judgement: Judgement) -> Table:
    proof = judgement.proof
    table = Table("what", "count", "how it was found", title="From Kafka to Elasticsearch, counted from outside")
    table.columns[1].justify = "right"
    for name, count, how, bad in (
        ("acknowledged", judgement.kafka.acknowledged, "delivery reports, each compared with Kafka", False),
        ("in Kafka", proof.held, "end offsets less first offsets", False),
        ("read again", proof.read, "by a plain consumer", False),
        ("in the index", proof.indexed, "each _source compared with its record", False),
        ("dead letters", proof.dead_lettered, "bytes compared", False),
        ("lost", len(proof.lost), "in neither", True),
        ("doubled", len(proof.doubled), "more than once in both together", True),
        ("changed", len(proof.changed), "other than what was produced", True),
        ("misjudged", len(proof.misjudged), "in the wrong one of the two", True),
        ("unknown", len(proof.unknown), "documents without a record", True),
        (
            "batches",
            sum(judgement.batches.values()),
            ", ".join(f"{n} {s}" for s, n in judgement.batches.items()),
            False,
        ),
    ):
        table.add_row(name, f"{count:,}", how, style="red" if bad and count else None)
    return table
