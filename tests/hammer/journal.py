"""Records the result of each fault and other events, line by line in a file and on the console."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.hammer.kinds import BY_NAME, Fault

_AFTERMATH_SECONDS = 60.0


@dataclass(slots=True)
class Injection:
    """The injection of a fault. ``pids`` are the processes that were hit, the one that counts first; ``missed`` says
    why a fault hit nothing; times are seconds from the start of the schedule.
    """

    fault: int
    kind: str
    planned: float
    injected: float | None = None
    pids: Sequence[int] = ()
    missed: str | None = None
    ended: float | None = None
    notes: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    """What a person was shown of the stream while it lasted, each text once."""
    unnamed: str | None = None
    """What is missing in ``shown``: the part that was hit, though the fault lasted long enough to be seen."""

    @property
    def of_link(self) -> bool:
        """Whether it is of a link of the network."""
        return BY_NAME[self.kind].target.is_link

    @property
    def hit(self) -> bool:
        """Whether it hit."""
        return self.injected is not None and self.missed is None


class Journal:
    """The journal in ``file``, one JSON object a line; ``say`` gets lines for people. Thread-safe."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._say = say
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.injections: list[Injection] = []
        self.collateral: Counter[str] = Counter()
        """Servers that ended without having been hit, by name: the service manager started them again."""

    def begin(self) -> None:
        """Set the start of the schedule to now."""
        self._began = time.monotonic()

    def now(self) -> float:
        """Seconds since the start of the schedule."""
        return round(time.monotonic() - self._began, 2)

    def open(self, fault: Fault) -> Injection:
        """Begin the record of a fault."""
        injection = Injection(fault.number, fault.kind.name, fault.at)
        with self._lock:
            self.injections.append(injection)
        return injection

    def injected(self, injection: Injection, pids: Sequence[int] = ()) -> None:
        """Record that the fault hit, and which processes, if any."""
        injection.injected, injection.pids = self.now(), tuple(pids)
        some = ", ".join(map(str, pids[:4])) + (", …" if len(pids) > 4 else "")
        self.say(f"fault #{injection.fault}: {injection.kind}" + (f" (pid {some})" if some else ""))

    def others_at(self, injection: Injection) -> list[str]:
        """The names of other faults that could hide what this one, which still lasts, would have a person shown.

        A killed part is away for longer than its fault lasts, and a batch that failed on a full disk stays failed until
        it is run again.
        """
        since = self.now() if injection.injected is None else injection.injected
        with self._lock:
            return [
                f"#{other.fault} ({other.kind})"
                for other in self.injections
                if other is not injection
                and other.hit
                and (other.ended is None or other.ended + (0 if other.of_link else _AFTERMATH_SECONDS) > since)
            ]

    def missed(self, injection: Injection, why: str) -> None:
        """Record that the fault missed, and why."""
        injection.missed = why
        self.say(f"fault #{injection.fault}: {injection.kind} MISSED: {why}")

    def note(self, injection: Injection, text: str) -> None:
        """Add a note to an injection."""
        injection.notes.append(text)
        self.say(f"fault #{injection.fault}: {injection.kind}: {text}")

    def close(self, injection: Injection) -> None:
        """Record the end of an injection, and write it to the file."""
        injection.ended = self.now()
        self._write({"what": "fault", **asdict(injection)})

    def died(self, server: str, how: str) -> None:
        """Record that a server ended without having been hit."""
        with self._lock:
            self.collateral[server] += 1
        self.say(f"{server} has ended by itself ({how}) and is started again")
        self._write({"what": "collateral", "server": server, "how": how, "at": self.now()})

    def say(self, text: str) -> None:
        """A line for people."""
        self._say(f"{self.now():8.1f} s  {text}")

    def _write(self, entry: dict[str, Any]) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")
