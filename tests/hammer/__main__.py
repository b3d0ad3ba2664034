"""`python -m tests.hammer`: runs the hammer on the embedded stack."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tests.hammer.kinds import LedgerKind, Target

from headrace.cli.main import errors_as_one_line, single_command

_INTERRUPTED = 130


def faults(
    *,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults are injected.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the schedule: the same seed gives the same faults.")] = 7,
    rate: Annotated[float, typer.Option(min=1, help="Records produced a second.")] = 400.0,
    pace: Annotated[float, typer.Option(min=1, help="Seconds between two faults, on average.")] = 20.0,
    cluster: Annotated[bool, typer.Option("--cluster", help="Spark as a cluster of two workers.")] = False,
    network: Annotated[bool, typer.Option("--network", help="Also the faults of links between the parts.")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Also a host's faults: the ledger's disk, slow syncs, clocks.")
    ] = False,
    brokers: Annotated[int, typer.Option(min=1, help="Kafka's brokers; of three, the leader is hit.")] = 1,
    ledger: Annotated[LedgerKind, typer.Option(help="The database of the ledger.")] = LedgerKind.POSTGRES,
    keys: Annotated[bool, typer.Option(help="Also documents by key, with deletions: one batch runs at a time.")] = True,
    only: Annotated[list[Target] | None, typer.Option(help="Hit only these.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the schedule, and do nothing.")] = False,
    data: Annotated[Path, typer.Option(help="The run's folder. Each run deletes the one before it.")] = Path(
        ".headrace/faults"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the judgement as JSON.")] = False,
) -> None:
    """Kill, hang, restart and starve the parts of a stream under load, and check the result from outside.

    Exit code 0: nothing lost, nothing doubled, every batch done, the ledger consistent, every fault injected. 1: a
    check does not hold.
    """
    from tests.hammer.schedule import ScheduleOptions, make_schedule

    schedule = ScheduleOptions(
        seed=seed,
        minutes=minutes,
        pace=pace,
        cluster=cluster,
        network=network,
        host=host,
        brokers=brokers,
        only=frozenset(only or ()),
    )
    if dry_run:
        for fault in make_schedule(schedule):
            typer.echo(str(fault))
        return
    # Imported here, because the mount namespace has to be made before any library starts a thread.
    from tests.hammer.hammer import HammerOptions, run_hammer
    from tests.hammer.report import print_judgement

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    out, errors = Console(), Console(stderr=True)
    talk = errors if as_json else out
    try:
        judgement = run_hammer(
            HammerOptions(schedule, data, rate=rate, ledger=ledger, keys=keys),
            lambda line: talk.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    except KeyboardInterrupt:
        errors.print("Interrupted; everything is stopped.")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        errors.print(f"The seed was {seed}.", highlight=False)
    found = judgement.to_dict()
    (data / "judgement.json").write_text(json.dumps(found, indent=2))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_judgement(judgement, out)
    raise typer.Exit(0 if judgement.holds else 1)


if __name__ == "__main__":
    with errors_as_one_line():
        single_command(faults)()
