"""Finds free loopback ports."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

LOOPBACK = "127.0.0.1"

# Below the range of ports for outgoing connections on Linux (from 32768) and macOS (from 49152), so that no client's
# socket can take a port between the check here and the server's bind.
_FIRST, _LAST = 20_000, 32_000


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of the loopback interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        # Servers set this too, so that an ended server's connections in TIME_WAIT do not block the port.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((LOOPBACK, port))
            candidate.listen(1)
        except OSError:
            return False
        return True


def free_port(taken: Collection[int] = ()) -> int:
    """A free loopback port that is not in ``taken``; chosen at random, so that parallel runs do not collide."""
    for _ in range(1000):
        port = random.randint(_FIRST, _LAST)  # noqa: S311 - no secret
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port between {_FIRST} and {_LAST}")
