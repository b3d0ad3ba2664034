"""What the receiver job's attributes say of each listener: what it did not get, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.ledger.tables import JobRow

STATUS = "listeners"
"""The attribute of the receiver job that has the status of each listener, by its name. The bus writes it."""


@dataclass(frozen=True, slots=True)
class ListenerStatus:
    """A listener in one receiver job; the counts begin with the job.

    ``dropped`` events came while its queue was full, ``missed`` ones were deleted before it got them. ``failed`` is the
    number of its calls that raised. ``error`` is the last error, also of a listener that could not be made. ``slow``
    says which call takes long at the moment.
    """

    name: str
    dropped: int = 0
    missed: int = 0
    failed: int = 0
    error: str | None = None
    slow: str | None = None

    def __str__(self) -> str:
        counts = ((self.dropped, "events dropped"), (self.missed, "events missed"), (self.failed, "calls failed"))
        said = [*(f"{number:,} {what}" for number, what in counts if number), self.slow, self.error]
        return f"Listener {self.name}: {'; '.join(filter(None, said)) or 'gets all events'}"

    @property
    def well(self) -> bool:
        """Whether it has got every event, without an error, and is not slow."""
        return self == ListenerStatus(self.name)


def listener_statuses(job: JobRow | None) -> list[ListenerStatus]:
    """The listeners of a receiver job, sorted by name; none before the job has reported them."""
    found = {} if job is None else job.attributes.get(STATUS) or {}
    return [
        ListenerStatus(
            name=name,
            dropped=values.get("dropped", 0),
            missed=values.get("missed", 0),
            failed=values.get("failed", 0),
            error=values.get("error"),
            slow=values.get("slow"),
        )
        for name, values in sorted(found.items())
    ]
