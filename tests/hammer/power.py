"""`python -m tests.hammer.power`: power cuts that lose what was not synced, below the real log and the real ledger.

Each seed is a stream on a LazyFS: a process receives records and runs batches until it or the power ends, at a place
that depends on the seed. Then another process compares the disk with what was promised, and the stream goes on. The
same seeds run without one of the syncs: there it must be noticed that what was promised is lost.
"""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from tests.hammer.lazyfs import LazyFS, LazyFSError, find_lazyfs
from tests.hammer.powered_stream import LEDGER, PARTITIONS, LifePlan, LogEnd, Place, Promises, live, problems_of
from tests.support.faulty_files import sync_sites

from headrace.cli.main import single_command

_POLL_SECONDS = 0.005
_LIMIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sync that is not done: a ``site`` in headrace.wal.storage, or what SQLite's ``synchronous`` leaves out."""

    site: str | None = None
    synchronous: str | None = None

    def __str__(self) -> str:
        return self.site or f"SQLite: synchronous={self.synchronous}"


NOTHING = LeftOut()
_OF_DIRECTORY = ": directory"
_SITES = sorted(sync_sites())
_WRITES = ("LocalSegmentFile.append", "LocalStorage._write_new")
_APPENDS = ["LocalSegmentFile.append: fdatasync"] * len(_SITES)
EACH_SYNC = (
    *(LeftOut(site=site) for site in _SITES if not site.endswith(_OF_DIRECTORY)),
    LeftOut(synchronous="NORMAL"),
    LeftOut(synchronous="OFF"),
)
"""Those that LazyFS can show to be needed: of a file's data."""
NOT_SHOWN = [site for site in _SITES if site.endswith(_OF_DIRECTORY)]
"""Those that it cannot: names are durable at once."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a life ends. ``after`` is the number of promises after which the parent cuts the power, ``pause`` so many
    seconds later; ``log_end`` is a place in the log's writes, where the process or the power ends; ``injection`` is
    LazyFS's own, in the ledger's files. Nothing of these: the life ends in order, and then there is a cut."""

    text: str
    after: int | None = None
    pause: float = 0.0
    log_end: LogEnd | None = None
    kills_process: bool = False
    injection: str = ""

    @property
    def is_in_order(self) -> bool:
        """Whether nothing ends the life before its last step."""
        return self.after is None and self.log_end is None and not self.injection


@dataclass(frozen=True, slots=True)
class PowerOutcome:
    """What a seed's stream lost, empty if nothing, with how its lives should have ended, and how many of the ends were
    reached."""

    seed: int
    endings: tuple[str, ...]
    reached: int
    promises: int
    seconds: float
    problems: tuple[str, ...]


def ending_of(random: Random, below: Path) -> Ending:
    """Choose one, for a LazyFS above the directory ``below``."""
    kind = random.choice(("in order", "promise", "promise", "process", "process", "log", "log", "ledger", "torn"))
    if kind == "in order":
        return Ending("in order")
    if kind == "promise":
        # The first promises of a life are often of the first block in a segment.
        after = random.choice((1, 2, random.randint(1, 30)))
        return Ending(f"cut after promise {after}", after=after, pause=random.choice((0.0, random.uniform(0, 0.02))))
    if kind in ("process", "log"):
        # A process that is killed after a sync leaves nothing to be lost.
        places = list(Place) if kind == "log" else [Place.IN_WRITE, Place.BEFORE_SYNC]
        end = _log_end(random, random.choice(places))
        what = "killed" if kind == "process" else "cut"
        return Ending(f"{what} {end.place} {end.site} {end.number}", log_end=end, kills_process=kind == "process")
    file = random.choice((LEDGER, f"{LEDGER}-wal", f"{LEDGER}-wal"))
    number = random.randint(1, 10 if file == LEDGER else 100)
    if kind == "torn":
        kept = random.choice(([1], [2], [1, 3]))
        torn = f'[[injection]]\ntype="torn-op"\nfile="{below / file}"\noccurrence={number}\nparts=3\npersist={kept}\n'
        return Ending(f"cut in the middle of write {number} of {file}", injection=torn)
    timing = random.choice(("before", "after"))
    synced = f'[[injection]]\ntype="clear"\nfrom="{below / file}"\noccurrence={number}\ntiming="{timing}"\n'
    return Ending(f"cut {timing} sync {number} of {file}", injection=f'{synced}op="fsync"\ncrash=true\n')


def _log_end(random: Random, place: Place) -> LogEnd:
    if place is Place.IN_WRITE:
        return LogEnd(place, random.choice(_WRITES), random.randint(1, 9))
    # Half of these are of blocks, most of which a segment's first sync does not cover.
    return LogEnd(place, random.choice((*_APPENDS, *_SITES)), random.choice((1, random.randint(1, 9))))


class PoweredRound:
    """The lives of one seed's stream, in ``folder``."""

    def __init__(self, program: str, folder: Path, seed: int, left_out: LeftOut) -> None:
        self._disk = LazyFS(program, folder)
        self._seed = seed
        self._left_out = left_out
        self._random = Random(seed)
        self._lives = 0
        self.promises = Promises()
        self.promised = 0
        self.endings: list[str] = []
        self.reached = 0

    def run(self) -> list[str]:
        """Return the problems of the first cut that shows some."""
        try:
            return next((problems for problems in self._lives_of_all() if problems), [])
        finally:
            self._disk.cut_power()

    def _lives_of_all(self) -> Iterator[list[str]]:
        for _ in range(self._random.randint(1, 3)):
            yield self._live(ending_of(self._random, self._disk.below), looks=self._random.random() < 0.5)
        yield self._live(Ending("in order"), is_last=True)

    def _live(self, ending: Ending, *, looks: bool = True, is_last: bool = False) -> list[str]:
        """Live once. After a cut another process looks at the disk, or the stream goes on at once."""
        if not self._disk.has_power:
            self._disk.mount(ending.injection)
        self.endings.append(ending.text)
        plan = LifePlan(
            folder=self._disk.path,
            number=self._lives,
            seed=self._seed,
            produced=self.promises.produced,
            left_out=self._left_out.site,
            synchronous=self._left_out.synchronous,
            log_end=ending.log_end,
            kills=None if ending.kills_process else self._disk.pid,
        )
        self._lives += 1
        error = self._run_until(plan, ending)
        has_power = self._disk.has_power
        if not has_power and (ending.is_in_order or ending.kills_process):
            raise LazyFSError(f"LazyFS ended by itself in life {self._lives} of seed {self._seed}.")
        if error and has_power:
            return [f"life {self._lives} failed: {error}"]
        if is_last:
            # It ended in order, so everything is stored.
            self.promises.stored.update(dict.fromkeys(range(PARTITIONS), self.promises.produced))
        if ending.kills_process:
            return []
        self._disk.cut_power()
        return self._problems() if looks else []

    def _run_until(self, plan: LifePlan, ending: Ending) -> str:
        """Run the life in a process until it or the power ends. Returns its error."""
        said, process = _start(live, plan)
        until, promised = time.monotonic() + _LIMIT_SECONDS, 0
        try:
            while True:
                if said.poll(_POLL_SECONDS):
                    message = said.recv()
                    if isinstance(message, str):
                        return message
                    if self.promises.take(message):
                        promised += 1
                        self.promised += 1
                    if promised == ending.after:
                        time.sleep(ending.pause)
                        self._disk.cut_power()
                        return ""
                elif not self._disk.has_power:
                    return ""
                elif time.monotonic() > until:
                    return f"It was not done within {_LIMIT_SECONDS:.0f} s."
        except (EOFError, OSError):
            process.join()
            is_as_planned = process.exitcode == 0 or (process.exitcode == -signal.SIGKILL and ending.log_end)
            return "" if is_as_planned else f"its process ended with {process.exitcode}"
        finally:
            process.kill()
            process.join()
            self.reached += (process.exitcode == 0) == ending.is_in_order

    def _problems(self) -> list[str]:
        """What another process finds on the disk. What it writes without a sync is lost too."""
        self._disk.mount()
        said, process = _start(_say_problems, self._disk.path, self.promises)
        problems: list[str] | str = f"the process that looks at the disk is not done within {_LIMIT_SECONDS:.0f} s"
        try:
            if said.poll(_LIMIT_SECONDS):
                problems = said.recv()
        except EOFError:
            problems = "the process that looks at the disk was killed"
        process.kill()
        process.join()
        self._disk.cut_power()
        return [problems] if isinstance(problems, str) else problems


def _start(work: Callable[..., None], *arguments: object) -> tuple[Connection, Any]:
    """Start ``work`` in a process that has the modules already. What it says and its error come by the connection."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, work, *arguments), daemon=True)
    process.start()
    there.close()
    return here, process


def _work(said: Connection, work: Callable[..., None], *arguments: object) -> None:
    logging.disable(logging.CRITICAL)
    try:
        work(*arguments, said.send)
    except BaseException:
        said.send(traceback.format_exc())
        sys.exit(1)


def _say_problems(folder: Path, promises: Promises, say: Callable[[list[str]], None]) -> None:
    say(problems_of(folder, promises))


def run_seed(program: str, seed: int, left_out: LeftOut = NOTHING) -> PowerOutcome:
    """Run the lives of one seed. Raises LazyFSError."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="headrace-power-"))
    try:
        stream = PoweredRound(program, folder, seed, left_out)
        problems = stream.run()
        seconds = time.monotonic() - began
        return PowerOutcome(seed, tuple(stream.endings), stream.reached, stream.promised, seconds, tuple(problems))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command_of(seed: int) -> str:
    """The command that runs one seed alone, with all syncs."""
    return f"python -m tests.hammer.power --first {seed} --seeds 1 --without none"


def cut_power(
    *,
    seeds: Annotated[
        int, typer.Option(min=1, help="How many seeds are run with all syncs, and at most without one.")
    ] = 20,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    whole: Annotated[bool, typer.Option(help="Run the seeds with all syncs.")] = True,
    without: Annotated[list[str] | None, typer.Option(help="Leave out these syncs, not each; 'none' for none.")] = None,
) -> None:
    """Cut the power below streams on LazyFS, and compare what is left with what was promised.

    Exit code 0: with all syncs nothing is lost, and without any one of them some seed shows it. 1: not so. 3: there is
    no LazyFS, or it fails.
    """
    named = {str(each): each for each in EACH_SYNC}
    if unknown := set(without or ()) - {*named, "none"}:
        raise typer.BadParameter(f"{sorted(unknown)}: known are {[*named, 'none']}.")
    left_out = [each for name, each in named.items() if without is None or name in without]
    chosen = range(first, first + seeds)
    try:
        program = find_lazyfs()
        holds = not whole or _hold(program, chosen)
        for each in left_out:
            holds = _is_noticed(program, chosen, each) and holds
    except LazyFSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(3) from None
    typer.echo(f"LazyFS cannot show these, since names are durable at once there: {', '.join(NOT_SHOWN)}.")
    raise typer.Exit(0 if holds else 1)


def _hold(program: str, seeds: range) -> bool:
    """Whether nothing is lost with all syncs."""
    began, promises, reached, failed = time.monotonic(), 0, 0, 0
    for seed in seeds:
        outcome = run_seed(program, seed)
        promises, reached = promises + outcome.promises, reached + outcome.reached
        if outcome.problems:
            failed += 1
            typer.echo(f"Seed {seed} does not hold: {outcome}\nRepeat it: {command_of(seed)}")
    seconds = time.monotonic() - began
    typer.echo(
        f"{len(seeds)} seeds, {reached} ends reached, {promises} promises, {failed} seeds do not hold, {seconds:.0f} s"
    )
    # A stream that promises nothing loses nothing.
    return not failed and promises > 0


def _is_noticed(program: str, seeds: range, left_out: LeftOut) -> bool:
    """Whether a seed shows that this sync is needed."""
    began = time.monotonic()
    for seed in seeds:
        outcome = run_seed(program, seed, left_out)
        if outcome.problems:
            seconds = time.monotonic() - began
            typer.echo(
                f"Without {left_out}: seed {seed} shows it, {seconds:.0f} s: {outcome.problems[0].splitlines()[-1]}"
            )
            return True
    typer.echo(f"Without {left_out}: no seed of {len(seeds)} shows it. Either it is not needed, or the check is blind.")
    return False


if __name__ == "__main__":
    single_command(cut_power)()
