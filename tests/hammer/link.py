"""A link between two parts: a TCP proxy on loopback that can do to its connections what networks do."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from types import TracebackType
from typing import Self

from tests.hammer.kinds import Action

from headrace.devstack.server import LOOPBACK, free_port

DELAY_SECONDS = 0.5
TRICKLE_BYTES, TRICKLE_SECONDS = 64, 0.1
FLAP_SECONDS = (0.5, 2.0)
"""The least and the most time that a link that flaps is up, or down."""
_CONNECT_SECONDS = 5.0
_CHUNK = 1 << 16
# close() then sends a RST instead of a FIN.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Pair = tuple[socket.socket, socket.socket]
"""A connection's two sockets: the client's and the server's."""


class Link:
    """Passes connections to its port on to ``target``, a port of loopback, from entering to leaving its context.

    A fault has an effect on existing connections and on new ones. ``affected`` counts what the present or last fault
    has done: connections reset or refused, and pieces of data held back or lost. Of a ``silent`` link, connections that
    have lost bytes are not reset when a fault ends, and nothing passes through them.
    """

    def __init__(self, target: int, *, port: int | None = None, silent: bool = False) -> None:
        self.target = target
        self.silent = silent
        self.port = port or free_port()
        self.affected = 0
        self._fault: Action | None = None
        self._pairs: set[Pair] = set()
        self._torn: set[Pair] = set()
        """Connections that have lost bytes, so that they can never go on."""
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self._listener = socket.create_server((LOOPBACK, self.port), backlog=200)
        threading.Thread(target=self._accept, args=(self._listener,), name=f"link {self.port}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._listener is not None:
            # accept() in the other thread does not notice close() alone.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._reset(self.open)

    @property
    def fault(self) -> Action | None:
        """What is wrong with the link now; None if nothing is."""
        return self._fault

    @property
    def open(self) -> set[Pair]:
        """The connections that go through it."""
        with self._changed:
            return set(self._pairs)

    def begin(self, fault: Action) -> None:
        """Let the fault begin. `Action.RESET` is over at once, all others last until `end`."""
        with self._changed:
            self.affected = 0
            self._fault = None if fault is Action.RESET else fault
            self._changed.notify_all()
        if fault in (Action.RESET, Action.CUT):
            self._reset(self.open)

    def end(self) -> None:
        """Let everything pass. Connections that have lost bytes are reset, as by a firewall that has forgotten them, or
        stay silent, as behind one that does not even answer."""
        with self._changed:
            self._fault = None
            torn = set() if self.silent else set(self._torn)
            self._changed.notify_all()
        self._reset(torn, counted=False)

    def flap(self, seconds: float, seed: float, abort: threading.Event) -> None:
        """Cut the link and heal it in turn for ``seconds``, or until ``abort`` is set, at the times of `flapping`."""
        cut = True
        for phase in flapping(seconds, seed):
            # Not begin(): what all the cuts have done counts together.
            affected = self.affected
            if cut:
                self.begin(Action.CUT)
                self.affected += affected
            else:
                self.end()
            cut = not cut
            if abort.wait(phase):
                break
        self.end()

    def _reset(self, pairs: set[Pair], *, counted: bool = True) -> None:
        with self._changed:
            self._pairs -= pairs
            self._torn -= pairs
            self.affected += len(pairs) if counted else 0
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
                end.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self._fault is Action.CUT:
                with self._changed:
                    self.affected += 1
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                client.close()
                continue
            threading.Thread(target=self._connect, args=(client,), name=f"link {self.port}", daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection((LOOPBACK, self.target), _CONNECT_SECONDS)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        pair = (client, server)
        with self._changed:
            self._pairs.add(pair)
        for end in pair:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._pump, args=(pair, True), name=f"link {self.port}", daemon=True).start()
        self._pump(pair, answers=False)

    def _pump(self, pair: Pair, answers: bool) -> None:
        source, sink = reversed(pair) if answers else pair
        try:
            while data := source.recv(_CHUNK):
                self._pass_on(data, pair, sink, answers=answers)
        except OSError:
            pass
        with self._changed:
            self._pairs.discard(pair)
            self._torn.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _pass_on(self, data: bytes, pair: Pair, sink: socket.socket, *, answers: bool) -> None:
        self._hold_back(Action.DELAY, DELAY_SECONDS)
        while len(data) > TRICKLE_BYTES and self._fault is Action.TRICKLE:
            sink.sendall(data[:TRICKLE_BYTES])
            data = data[TRICKLE_BYTES:]
            self._hold_back(Action.TRICKLE, TRICKLE_SECONDS)
        with self._changed:
            if self.silent and pair in self._torn:
                return
            if self._fault is Action.BLACKHOLE or (self._fault is Action.LOSE_ANSWERS and answers):
                self.affected += 1
                self._torn.add(pair)
                return
        sink.sendall(data)

    def _hold_back(self, fault: Action, seconds: float) -> None:
        """Wait while the link has this fault, ``seconds`` at most."""
        with self._changed:
            if self._fault is fault:
                self.affected += 1
                self._changed.wait_for(lambda: self._fault is not fault, seconds)


def flapping(seconds: float, seed: float) -> list[float]:
    """The lengths in seconds of the phases of a flapping link: cut, healed, cut, … The same seed gives the same."""
    chance = random.Random(seed)
    phases: list[float] = []
    while sum(phases) < seconds:
        phases.append(round(chance.uniform(*FLAP_SECONDS), 2))
    return phases
