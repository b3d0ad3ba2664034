"""Injects a fault: waits for the target, hits it, checks the effect, and ends the fault."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import psutil
from tests.hammer import signals
from tests.hammer.disk import SmallDisk
from tests.hammer.errors import SmallDiskError, TargetMissedError
from tests.hammer.false_clock import FalseClock
from tests.hammer.journal import Injection, Journal
from tests.hammer.kinds import WORDS, Action, Fault, Target
from tests.hammer.link import Link
from tests.hammer.onlooker import Shown
from tests.hammer.services import Services, answers
from tests.hammer.slow_syncs import SlowSyncs
from tests.hammer.target_processes import Group, TargetProcesses

from headrace.devstack.server import Server

TIMEOUT_SECONDS = 420.0
"""How long a fault waits for its target: after other faults it may take a while until the target runs again."""
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 180.0
_STOP_SECONDS = 60.0
LOOK_SECONDS = 4.0
"""How often it looks, while a fault holds, at what a person is shown."""
# How long a sync takes: longer than any disk that is well (SLOW_SECONDS), shorter than a receiver's lease.
_SYNC_SECONDS = 3.0, 8.0


class FaultInjector:
    """Injects faults; the caller uses one thread for each."""

    def __init__(
        self,
        *,
        targets: TargetProcesses,
        services: Services,
        disks: Mapping[Target, SmallDisk],
        delete_ledger: Callable[[], None],
        shrink_ledger: Callable[[], None],
        journal: Journal,
        links: Mapping[Target, Sequence[Link]] | None = None,
        look: Callable[[], Shown] | None = None,
        leader: Callable[[], str] | None = None,
        syncs: SlowSyncs | None = None,
        clock: FalseClock | None = None,
    ) -> None:
        """``disks`` and ``links`` by target, those that the run has; ``look`` returns what a person is shown of the
        stream, ``leader`` the name of the broker to hit as the leader."""
        self.hanging = signals.Hanging()
        self._targets = targets
        self._services = services
        self._disks = disks
        self._syncs = syncs
        self._clock = clock
        self._delete_ledger = delete_ledger
        self._shrink_ledger = shrink_ledger
        self._journal = journal
        self._links = links or {}
        self._look = look
        self._leader = leader
        self._abort = threading.Event()
        self._locks = {target: threading.Lock() for target in Target}
        """For targets that have one fault at a time."""

    def inject(self, fault: Fault) -> Injection:
        """Inject the fault and wait for its end. Returns the injection, which records a miss."""
        injection = self._journal.open(fault)
        try:
            if fault.kind.action is Action.FILL:
                self._fill(fault, injection)
            elif fault.kind.target is Target.SYNCS:
                self._slow_down(fault, injection)
            elif fault.kind.target is Target.CLOCK:
                self._start_with_clock(fault, injection)
            elif fault.kind.target is Target.LEDGER:
                with self._locks[Target.LEDGER]:
                    self._lose_ledger(fault, injection)
            elif fault.kind.target.is_link:
                self._inject_into_link(fault, injection)
            elif fault.kind.target.is_server:
                self._inject_into_server(fault, injection)
            else:
                self._inject_into_process(fault, injection)
        except (TargetMissedError, SmallDiskError) as error:
            self._journal.missed(injection, str(error))
        finally:
            self._journal.close(injection)
        return injection

    def release(self) -> None:
        """End all faults that are being held, and inject no more."""
        self._abort.set()
        self.hanging.release()
        for links in self._links.values():
            for link in links:
                link.end()

    # --- processes that headrace and Spark start again

    def _inject_into_process(self, fault: Fault, injection: Injection) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            self._find(fault.kind.target, deadline)
            self._abort.wait(fault.aim)
            # Search again: a process that was found before the aim time may have ended.
            groups = self._targets.find(fault.kind.target)
            if not groups:
                continue
            group = groups[int(fault.pick * len(groups))]
            try:
                self._hit(fault, injection, group)
                return
            except TargetMissedError as missed:
                if injection.injected is not None or time.monotonic() > deadline:
                    raise
                self._journal.note(injection, f"{missed}; the next one is waited for")

    def _find(self, target: Target, deadline: float) -> None:
        while not self._targets.find(target):
            self._wait(deadline, f"there was no {target}")

    def _hit(self, fault: Fault, injection: Injection, group: Group) -> None:
        pids = [process.pid for process in group]
        if fault.kind.action is Action.KILL:
            # An executor's own workers should notice its end by themselves.
            signals.kill(group[:1] if fault.kind.target is Target.EXECUTOR else group)
            self._journal.injected(injection, pids)
        elif fault.kind.action is Action.TERM:
            signals.terminate(group)
            self._journal.injected(injection, pids)
            self._see_end(injection, group[0])
        else:
            self.hanging.stop(group)
            self._journal.injected(injection, pids)
            self._abort.wait(fault.hold)
            stood = self.hanging.go_on(group)
            self._journal.note(injection, "goes on" if stood else "has been ended by others while it hung")

    def _see_end(self, injection: Injection, process: psutil.Process) -> None:
        began = time.monotonic()
        try:
            process.wait(_STOP_SECONDS)
            self._journal.note(injection, f"ended after {time.monotonic() - began:.1f} s")
        except psutil.TimeoutExpired:
            self._journal.note(injection, f"still runs after {_STOP_SECONDS:g} s")
        except psutil.Error:
            self._journal.note(injection, "ended")

    # --- servers

    def _inject_into_server(self, fault: Fault, injection: Injection) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        name = self._choose_server(fault, deadline)
        while True:
            # A server that is down, from another fault or by itself, is restarted by the service manager.
            answers(self._services.servers[name], _ANSWER_SECONDS)
            with self._services.held(name) as server:
                if server.alive:
                    self._hit_server(fault, injection, server)
                    break
            if time.monotonic() > deadline or self._abort.wait(_POLL_SECONDS):
                raise TargetMissedError(f"{name} did not run for {TIMEOUT_SECONDS:g} s")
        began = time.monotonic()
        if answers(self._services.servers[name], _ANSWER_SECONDS):
            self._journal.note(injection, f"answers after {time.monotonic() - began:.1f} s")
        else:
            self._journal.note(injection, f"does not answer within {_ANSWER_SECONDS:g} s")

    def _choose_server(self, fault: Fault, deadline: float) -> str:
        if fault.kind.target is not Target.LEADER:
            names = self._services.named(fault.kind.target.value)
            return names[int(fault.pick * len(names))]
        if self._leader is None:
            raise TargetMissedError("the run has one broker")
        while True:
            try:
                return self._leader()
            except TargetMissedError:
                if time.monotonic() > deadline or self._abort.wait(_POLL_SECONDS):
                    raise

    def _hit_server(self, fault: Fault, injection: Injection, server: Server) -> None:
        if fault.kind.action is Action.HANG:
            self._hang(fault, injection, server)
        else:
            self._take_down(fault, injection, server)

    def _take_down(self, fault: Fault, injection: Injection, server: Server) -> None:
        process = server.process
        pids = [process.pid]
        if not process.alive:
            raise TargetMissedError(f"{server.name} had ended before the fault")
        if fault.kind.action is Action.KILL:
            server.kill()
            if not process.wait(_STOP_SECONDS):
                raise TargetMissedError(f"{server.name} outlived kill -9")
            self._journal.injected(injection, pids)
        else:
            psutil.Process(process.pid).send_signal(process.spec.stop_signal)
            self._journal.injected(injection, pids)
            if not process.wait(_STOP_SECONDS):
                self._journal.note(injection, f"did not stop within {_STOP_SECONDS:g} s and was killed")
                server.kill()
        self._abort.wait(fault.hold)
        server.launch()

    def _hang(self, fault: Fault, injection: Injection, server: Server) -> None:
        main = psutil.Process(server.process.pid)
        # The processes that the scheduler has started are not hit.
        group = [main] if fault.kind.target is Target.SCHEDULER else [main, *main.children(recursive=True)]
        self.hanging.stop(group)
        self._journal.injected(injection, [process.pid for process in group])
        self._abort.wait(fault.hold)
        stood = self.hanging.go_on(group)
        self._journal.note(injection, "goes on" if stood else "has been ended by others while it hung")

    # --- links

    def _inject_into_link(self, fault: Fault, injection: Injection) -> None:
        links = self._links.get(fault.kind.target)
        if not links:
            raise TargetMissedError("the run has no such link")
        self._abort.wait(fault.aim)
        with self._locks[fault.kind.target]:
            over = threading.Event()
            flapping = [
                threading.Thread(target=link.flap, args=(TIMEOUT_SECONDS + fault.hold, fault.pick, over), daemon=True)
                for link in links
                if fault.kind.action is Action.FLAP
            ]
            try:
                for thread in flapping:
                    thread.start()
                if not flapping:
                    self._begin(links, fault.kind.action)
                self._await_effect(links, fault.kind.action)
                self._journal.injected(injection)
                self._watch(fault, injection)
            finally:
                over.set()
                for thread in flapping:
                    thread.join()
                for link in links:
                    link.end()
            self._journal.note(injection, f"is over, after {sum(link.affected for link in links)} effects")

    def _begin(self, links: Sequence[Link], action: Action) -> None:
        for link in links:
            link.begin(action)

    def _await_effect(self, links: Sequence[Link], action: Action) -> None:
        """Wait until something is reset, refused, held back or lost."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(link.affected for link in links):
            if time.monotonic() > deadline or self._abort.wait(_POLL_SECONDS):
                raise TargetMissedError(f"nothing went through the link for {TIMEOUT_SECONDS:g} s")
            if action is Action.RESET:
                self._begin(links, action)

    # --- the ledger

    def _lose_ledger(self, fault: Fault, injection: Injection) -> None:
        """Delete the ledger of a stream that receives, and kill the stream's processes just before or just after."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        self._writers_by(deadline)
        self._abort.wait(fault.aim)
        if fault.pick < 0.5:
            self._do_by(deadline, self._delete_ledger, "deleted")
        groups = [*self._targets.find(Target.RECEIVER_JOB), *self._targets.find(Target.BATCH)]
        for group in groups:
            # A batch may end by itself just now.
            with contextlib.suppress(TargetMissedError):
                signals.kill(group)
        if fault.pick >= 0.5:
            self._do_by(deadline, self._delete_ledger, "deleted")
        self._journal.injected(injection, [process.pid for group in groups for process in group])
        began = time.monotonic()
        if self._receives_by(began + TIMEOUT_SECONDS):
            self._journal.note(injection, f"the stream receives again after {time.monotonic() - began:.1f} s")
            # Before it is lost once more.
            self._abort.wait(fault.hold)
        else:
            self._journal.note(injection, f"the stream does not receive within {TIMEOUT_SECONDS:g} s")

    def _do_by(self, deadline: float, act: Callable[[], None], done: str) -> None:
        while True:
            try:
                act()
            except Exception as error:  # as its driver has it, while the database is down by another fault
                if time.monotonic() > deadline or self._abort.wait(_POLL_SECONDS):
                    raise TargetMissedError(f"the ledger could not be {done}: {error}") from error
            else:
                return

    def _receives_by(self, deadline: float) -> bool:
        while not self._targets.writers():
            if time.monotonic() > deadline or self._abort.wait(_POLL_SECONDS):
                return False
        return True

    # --- what is around the processes: disks, their syncs, clocks

    def _fill(self, fault: Fault, injection: Injection) -> None:
        disk = self._disks.get(fault.kind.target)
        if disk is None:
            raise TargetMissedError("it is no small file system here")
        with self._locks[fault.kind.target]:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            writers = self._writers_by(deadline)
            if fault.kind.target is Target.LEDGER_DISK:
                # It would go on for minutes in the space that its files have.
                self._do_by(deadline, self._shrink_ledger, "shrunk")
            with disk.full():
                self._journal.injected(injection, [writer.pid for writer in writers])
                self._watch(fault, injection)
            self._journal.note(injection, f"has {disk.free >> 20} MiB again")

    def _slow_down(self, fault: Fault, injection: Injection) -> None:
        if self._syncs is None:
            raise TargetMissedError("the run has no slow syncs")
        least, most = _SYNC_SECONDS
        seconds = least + fault.pick * (most - least)
        with self._locks[fault.kind.target], self._syncs.slow(seconds):
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not self._syncs.delayed:
                self._wait(deadline, "nobody synced the log")
            self._journal.injected(injection)
            self._watch(fault, injection)
            self._journal.note(injection, f"is over, after {self._syncs.delayed} syncs of {seconds:.1f} s")

    def _start_with_clock(self, fault: Fault, injection: Injection) -> None:
        """Have the receiver job start again with this clock, and in the end with the right one."""
        if self._clock is None:
            raise TargetMissedError("the run has no other clock")
        with self._locks[fault.kind.target]:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            self._find(Target.RECEIVER_JOB, deadline)
            with self._clock.wrong(fault.kind.action):
                self._kill_jobs()
                while not (writers := [one for one in self._targets.writers() if self._clock.is_of(one)]):
                    self._wait(deadline, "nobody wrote to the log with this clock")
                self._journal.injected(injection, [writer.pid for writer in writers])
                self._watch(fault, injection)
            self._kill_jobs()

    def _kill_jobs(self) -> None:
        for job in self._targets.find(Target.RECEIVER_JOB):
            # It may end by itself just now.
            with contextlib.suppress(TargetMissedError):
                signals.kill(job)

    def _writers_by(self, deadline: float) -> Group:
        while not (writers := self._targets.writers()):
            self._wait(deadline, "nobody wrote to the log")
        return writers

    def _wait(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline or self._abort.wait(_POLL_SECONDS):
            raise TargetMissedError(f"{what} for {TIMEOUT_SECONDS:g} s")

    # --- what a person is shown

    def _watch(self, fault: Fault, injection: Injection) -> None:
        """Hold the fault, and see whether a person is shown the part that is hit with a remedy."""
        until, words = time.monotonic() + fault.hold, WORDS[fault.kind.target]
        named = False
        while (left := until - time.monotonic()) > 0 and not self._abort.wait(min(LOOK_SECONDS, left)):
            if self._look is None:
                continue
            shown = self._look()
            if str(shown) not in injection.shown:
                injection.shown.append(str(shown))
            if not named and shown.names(words):
                named = True
                seconds = fault.hold - (until - time.monotonic())
                self._journal.note(injection, f"is shown after {seconds:.0f} s: {shown}")
        if fault.is_visible and self._look is not None and not named:
            self._note_unnamed(fault, injection)

    def _note_unnamed(self, fault: Fault, injection: Injection) -> None:
        """Record that nothing named the part; it counts if nothing else was to be shown at the same time."""
        lacking = f"in {fault.hold:.0f} s nothing named {WORDS[fault.kind.target].part[0]} with a remedy"
        if others := self._journal.others_at(injection):
            self._journal.note(injection, f"{lacking}; not counted, because of {', '.join(others)}")
            return
        injection.unnamed = lacking
        self._journal.note(injection, f"{lacking}; the last that was shown: {injection.shown[-1:]}")
