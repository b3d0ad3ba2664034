"""Each fault of a link, on real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.hammer import link as module
from tests.hammer.kinds import Action
from tests.hammer.link import Link, flapping
from tests.unit.hammer.conftest import Echo, wait_until


@pytest.fixture
def client(link: Link) -> Iterator[socket.socket]:
    """A connection through the link that has worked."""
    with connect(link) as client:
        assert exchange(client, b"before") == b"before"
        yield client


def connect(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), 30)


def exchange(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    answer = b""
    while len(answer) < len(data):
        answer += (piece := client.recv(4096))
        if not piece:
            break
    return answer


def fails(client: socket.socket) -> bool:
    """Whether the connection has been reset, or is closed."""
    try:
        return exchange(client, b"more") == b""
    except OSError as error:
        assert not isinstance(error, TimeoutError)
        return True


def works(link: Link) -> bool:
    try:
        with connect(link) as client:
            return exchange(client, b"again") == b"again"
    except ConnectionError:
        return False


def test_a_cut_link_resets_its_connections_and_takes_no_new_ones(link: Link, client: socket.socket) -> None:
    link.begin(Action.CUT)
    assert fails(client)
    assert not works(link)
    wait_until(lambda: link.affected == 2)
    link.end()
    assert works(link)


def test_a_reset_ends_what_is_open_and_nothing_else(link: Link, client: socket.socket) -> None:
    link.begin(Action.RESET)
    assert link.affected == 1
    assert fails(client)
    assert works(link)


@pytest.mark.parametrize("fault", [Action.BLACKHOLE, Action.LOSE_ANSWERS])
def test_nothing_comes_back_while_the_connection_stays_open(
    fault: Action, link: Link, client: socket.socket, echo: Echo
) -> None:
    link.begin(fault)
    client.sendall(b"request")
    wait_until(lambda: link.affected > 0)
    assert (b"request" in echo.got) is (fault is Action.LOSE_ANSWERS)
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.recv(1)
    client.settimeout(30)
    link.end()
    # What was lost stays lost: the connection ends, and does not go on with a hole.
    assert fails(client)
    assert works(link)


def test_a_silent_links_torn_connections_stay_silent(echo: Echo) -> None:
    with Link(echo.port, silent=True) as link, connect(link) as client:
        assert exchange(client, b"before") == b"before"
        link.begin(Action.BLACKHOLE)
        client.sendall(b"lost")
        wait_until(lambda: link.affected > 0)
        link.end()
        client.sendall(b"more")
        assert works(link)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert b"more" not in echo.got


def test_delayed_data_comes_late_and_whole(link: Link, client: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY_SECONDS", 0.05)
    link.begin(Action.DELAY)
    began = time.monotonic()
    assert exchange(client, b"late") == b"late"
    assert time.monotonic() - began >= 0.1
    assert link.affected == 2
    link.end()
    assert exchange(client, b"after") == b"after"


def test_a_trickle_is_whole_in_the_end(link: Link, client: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRICKLE_SECONDS", 0.005)
    link.begin(Action.TRICKLE)
    data = bytes(range(256))
    assert exchange(client, data) == data
    assert link.affected >= 3
    link.end()
    assert exchange(client, b"after") == b"after"


def test_a_delay_or_a_trickle_ends_at_once_with_the_fault(
    link: Link, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DELAY_SECONDS", 600.0)
    monkeypatch.setattr(module, "TRICKLE_SECONDS", 600.0)
    for fault in (Action.DELAY, Action.TRICKLE):
        link.begin(fault)
        data = b"x" * 100
        client.sendall(data)
        wait_until(lambda: link.affected > 0)
        link.end()
        answer = b""
        while len(answer) < len(data):
            answer += client.recv(4096)
        assert answer == data


def test_a_flapping_link_cuts_connections_and_works_afterwards(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLAP_SECONDS", (0.02, 0.04))
    abort = threading.Event()
    flap = threading.Thread(target=link.flap, args=(60.0, 0.5, abort))
    flap.start()
    failed = 0
    while failed < 3:
        failed += not works(link)
    abort.set()
    flap.join(30)
    assert link.affected >= 3
    assert link.fault is None
    assert works(link)


def test_a_seed_gives_the_times_of_a_flapping_link() -> None:
    assert flapping(20, 0.3) == flapping(20, 0.3) != flapping(20, 0.4)
    assert sum(flapping(20, 0.3)) >= 20


def test_a_server_that_is_down_closes_the_connection(link: Link, echo: Echo) -> None:
    echo.close()
    assert not works(link)
