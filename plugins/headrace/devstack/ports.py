"""Free loopback ports."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

LOOPBACK = "127.0.0.1"

# Below the range from which Linux (32768) and macOS (49152) take the ports of outgoing connections: a port found
# here cannot be taken by a client's socket between the look and the server's bind.
_FIRST, _LAST = 20_000, 32_000


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of the loopback interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        # As servers do: connections of an ended server that linger in TIME_WAIT are no obstacle.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((LOOPBACK, port))
            candidate.listen(1)
        except OSError:
            return False
        return True


def free_port(taken: Collection[int] = ()) -> int:
    """A free loopback port that is not in ``taken``; drawn at random, so that parallel runs do not meet."""
    for _ in range(1000):
        port = random.randint(_FIRST, _LAST)  # noqa: S311 - no secret
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port between {_FIRST} and {_LAST}")
