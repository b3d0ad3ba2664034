"""Injections: each has an effect on a real process, or is a miss."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.hammer import fault_injector
from tests.hammer import services as services_module
from tests.hammer.errors import TargetMissedError
from tests.hammer.fault_injector import FaultInjector
from tests.hammer.journal import Journal
from tests.hammer.kinds import KINDS, Kind, Target
from tests.hammer.link import Link
from tests.hammer.onlooker import Shown
from tests.hammer.services import Services
from tests.unit.hammer.conftest import Found, Pages, Sleeper, fault, wait_until


@pytest.fixture
def injector(targets: Found, server: Sleeper, journal: Journal, ledger: Path) -> FaultInjector:
    """With one server."""
    return FaultInjector(
        targets=targets,
        services=Services({server.name: server}, journal),
        disks={},
        delete_ledger=ledger.unlink,
        shrink_ledger=lambda: None,
        journal=journal,
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Its database."""
    return tmp_path / "ledger.db"


def test_kill_9_of_a_server_and_its_start_afterwards(injector: FaultInjector, server: Sleeper, tmp_path: Path) -> None:
    before = server.process.pid
    injection = injector.inject(fault("kafka kill -9", hold=0.1))
    assert injection.hit
    assert injection.pids == (before,)
    assert server.alive
    assert server.process.pid != before
    (line,) = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert json.loads(line)["pids"] == [before]


def test_restart_of_a_server(injector: FaultInjector, server: Sleeper) -> None:
    before = server.process
    assert injector.inject(fault("kafka restart")).hit
    assert before.exit_code == -15
    assert server.process.pid != before.pid


def test_a_server_that_ends_while_it_starts_is_started_again(
    injector: FaultInjector, server: Sleeper, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Airflow's components do whose database is down as well."""
    monkeypatch.setattr(services_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(services_module, "RESTART_SECONDS", 0.1)
    with injector._services:
        thread = threading.Thread(target=injector.inject, args=(fault("kafka kill -9", hold=1.0),))
        thread.start()
        wait_until(lambda: bool(journal.injections) and journal.injections[0].hit)
        monkeypatch.setattr(server, "ready", server.folder / "never")
        wait_until(lambda: server.alive)
        server.kill()
        wait_until(lambda: journal.collateral["kafka"] == 1 and server.alive)
        server.folder.joinpath("never").touch()
        thread.join(60)
    assert journal.injections[0].hit


def test_a_server_hangs_for_a_while(injector: FaultInjector, server: Sleeper, journal: Journal) -> None:
    main = psutil.Process(server.process.pid)
    injecting_thread = threading.Thread(target=injector.inject, args=(fault("kafka SIGSTOP", hold=600),))
    injecting_thread.start()
    wait_until(lambda: bool(journal.injections) and journal.injections[0].hit)
    assert main.status() == psutil.STATUS_STOPPED
    injector.release()
    injecting_thread.join(60)
    assert main.status() != psutil.STATUS_STOPPED


def test_a_target_that_comes_late_is_waited_for(
    injector: FaultInjector, targets: Found, process: psutil.Process
) -> None:
    threading.Timer(0.2, lambda: targets.groups.append([process])).start()
    injection = injector.inject(fault("batch kill -9"))
    assert injection.hit
    assert injection.pids == (process.pid,)
    assert process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("pick", [0.2, 0.7])
def test_a_ledger_is_deleted_and_the_stream_killed(
    injector: FaultInjector, targets: Found, process: psutil.Process, ledger: Path, pick: float
) -> None:
    ledger.touch()
    targets.groups.append([process])
    thread = threading.Thread(target=injector.inject, args=(replace(fault("ledger deleted"), pick=pick),))
    thread.start()
    wait_until(lambda: not targets.writers())
    wait_until(lambda: not ledger.exists())
    # The stream does not receive again.
    injector.release()
    thread.join(60)
    (injection,) = injector._journal.injections
    assert (injection.hit, injection.pids) == (True, (process.pid, process.pid))
    assert process.status() == psutil.STATUS_ZOMBIE


def test_a_ledger_that_cannot_be_deleted_is_a_miss(
    injector: FaultInjector, targets: Found, process: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_injector, "TIMEOUT_SECONDS", 0.1)
    targets.groups.append([process])
    injection = injector.inject(fault("ledger deleted"))
    assert not injection.hit
    assert "could not be deleted" in str(injection.missed)


def test_a_target_that_never_comes_is_a_miss(injector: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injector, "TIMEOUT_SECONDS", 0.1)
    injection = injector.inject(fault("batch kill -9"))
    assert not injection.hit
    assert "there was no batch" in str(injection.missed)


def test_a_target_that_has_just_ended_does_not_count(
    injector: FaultInjector, targets: Found, process: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_injector, "TIMEOUT_SECONDS", 0.2)
    process.kill()
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    targets.groups = [[process]]
    injection = injector.inject(fault("batch kill -9"))
    assert not injection.hit
    assert "had ended before the fault" in str(injection.missed)


def test_a_target_that_others_end_while_it_hangs_is_reported(
    injector: FaultInjector, targets: Found, process: psutil.Process, journal: Journal, lines: list[str]
) -> None:
    def kill_when_injected() -> None:
        # Not as soon as it stands still: the injector has to see that too, or it waits for the next process.
        wait_until(lambda: any(injection.injected is not None for injection in journal.injections))
        process.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        injector.release()

    targets.groups = [[process]]
    killer = threading.Thread(target=kill_when_injected)
    killer.start()
    injection = injector.inject(fault("batch SIGSTOP", hold=120.0))
    killer.join()
    assert injection.hit
    assert injection.notes == ["has been ended by others while it hung"]
    assert "ended by others" in lines[-1]


def test_without_a_small_disk_a_full_one_is_a_miss(injector: FaultInjector) -> None:
    assert not injector.inject(fault("disk full")).hit


@pytest.fixture
def of_links(
    targets: Found, journal: Journal, link: Link, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> FaultInjector:
    """With a link to Kafka."""
    monkeypatch.setattr(fault_injector, "LOOK_SECONDS", 0.01)
    return FaultInjector(
        targets=targets,
        services=Services({}, journal),
        disks={},
        delete_ledger=lambda: None,
        shrink_ledger=lambda: None,
        journal=journal,
        links={Target.KAFKA_LINK: [link]},
        look=pages.look,
    )


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.target is Target.KAFKA_LINK], ids=lambda kind: kind.name
)
def test_each_fault_of_a_link_hits_what_goes_through_it_and_ends(
    kind: Kind, of_links: FaultInjector, link: Link, journal: Journal
) -> None:
    with socket.create_connection(("127.0.0.1", link.port), 30) as client:
        wait_until(lambda: len(link.open) == 1)
        thread = threading.Thread(target=of_links.inject, args=(fault(kind.name, hold=0.05),))
        thread.start()
        while thread.is_alive() and not (journal.injections and journal.injections[0].hit):
            # A connection that is cut, or on which something is sent, is one that a fault hits.
            with contextlib.suppress(OSError):
                client.sendall(b"x" * 100)
            thread.join(0.01)
        thread.join(60)
    (injection,) = journal.injections
    assert injection.hit
    assert link.affected
    assert link.fault is None


def test_a_link_that_nothing_goes_through_is_a_miss(of_links: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injector, "TIMEOUT_SECONDS", 0.1)
    injection = of_links.inject(fault("kafka-link cut"))
    assert not injection.hit
    assert "nothing went through" in str(injection.missed)


def test_a_link_that_a_run_has_not_is_a_miss(of_links: FaultInjector) -> None:
    assert "no such link" in str(of_links.inject(fault("search-link cut")).missed)


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        (Shown("failing", "Kafka at 127.0.0.1:1 cannot be asked.", "Start the broker."), True),
        (Shown("failing", "Kafka at 127.0.0.1:1 cannot be asked.", None), False),
        (Shown("failing", "An executor is slow.", "Give it more cores."), False),
        (Shown("well", "All is well.", None), False),
    ],
)
def test_a_lasting_fault_has_to_be_shown_with_part_and_remedy(
    shown: Shown, seen: bool, of_links: FaultInjector, link: Link, pages: Pages
) -> None:
    pages.shown = shown
    with socket.create_connection(("127.0.0.1", link.port), 30):
        wait_until(lambda: len(link.open) == 1)
        injection = of_links.inject(fault("kafka-link cut", hold=0.2))
    assert injection.shown == [str(shown)]
    assert (injection.unnamed is None) is seen


@pytest.mark.parametrize(
    ("other", "ended", "counts"),
    [
        ("batch kill -9", True, False),
        ("disk full", True, False),
        ("kafka SIGSTOP", False, False),
        ("ledger-link cut", False, False),
        ("ledger-link cut", True, True),
    ],
)
def test_another_fault_may_hide_what_a_link_would_show(
    *, other: str, ended: bool, counts: bool, of_links: FaultInjector, link: Link, journal: Journal
) -> None:
    opened = journal.open(fault(other))
    journal.injected(opened)
    if ended:
        journal.close(opened)
        wait_until(lambda: journal.now() > float(str(opened.ended)))
    with socket.create_connection(("127.0.0.1", link.port), 30):
        wait_until(lambda: len(link.open) == 1)
        injection = of_links.inject(fault("kafka-link cut", hold=0.2))
    assert (injection.unnamed is not None) is counts


def test_a_short_or_a_slow_fault_need_not_be_shown(of_links: FaultInjector, link: Link) -> None:
    for kind, hold in (("kafka-link cut", 0.05), ("kafka-link flapping", 0.2)):
        with socket.create_connection(("127.0.0.1", link.port), 30):
            wait_until(lambda: len(link.open) == 1)
            assert of_links.inject(fault(kind, hold=hold)).unnamed is None


def test_release_ends_the_faults_of_links(of_links: FaultInjector, link: Link, journal: Journal) -> None:
    with socket.create_connection(("127.0.0.1", link.port), 30):
        wait_until(lambda: len(link.open) == 1)
        thread = threading.Thread(target=of_links.inject, args=(fault("kafka-link cut", hold=600),))
        thread.start()
        wait_until(lambda: bool(journal.injections) and journal.injections[0].hit)
        of_links.release()
        thread.join(60)
    assert link.fault is None


def test_the_leader_is_the_broker_that_leads_when_it_is_hit(
    injector: FaultInjector, server: Sleeper, journal: Journal
) -> None:
    answers: list[str | None] = [None, None, server.name]

    def leader() -> str:
        name = answers.pop(0)
        if name is None:
            raise TargetMissedError("nobody leads")
        return name

    injector._leader = leader
    before = server.process.pid
    injection = injector.inject(fault("leader kill -9", hold=0.1))
    assert injection.hit
    assert injection.pids == (before,)
    assert not answers


def test_without_further_brokers_a_leader_is_a_miss(injector: FaultInjector) -> None:
    assert "one broker" in str(injector.inject(fault("leader SIGSTOP")).missed)
