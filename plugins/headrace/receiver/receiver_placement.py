"""Where a stream's receivers are and are to go next, while executors come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from headrace.blocks import ReceiverId
from headrace.receiver.scheduling_policy import (
    Executor,
    Location,
    Placement,
    reschedule_receiver,
    schedule_receivers,
)
from headrace.stream import Stream


class ReceiverPlacement:
    """Keeps the plan that was made for all receivers when the first of them started, as Spark's tracker does.

    A receiver that starts again goes where the plan has it, as long as an executor of those lives; else it is placed
    anew beside the others.
    """

    def __init__(self, stream: Stream) -> None:
        self._preferred: list[tuple[ReceiverId, str | None]] = []
        for source in stream.inputs:
            hosts = source.preferred_hosts
            for index in range(source.receivers):
                # One for all, or one for each.
                host = hosts[min(index, len(hosts) - 1)] if hosts else None
                self._preferred.append((ReceiverId(stream.name, source.id, index), host))
        self._plan: dict[ReceiverId, tuple[Location, ...]] = {}
        self._latest: dict[ReceiverId, tuple[Location, ...]] = {}

    def candidates(
        self,
        receiver: ReceiverId,
        executors: Collection[Executor],
        running: Callable[[], Mapping[ReceiverId, Executor | None]],
    ) -> tuple[Location, ...]:
        """Where to start ``receiver``; nowhere in particular where there are no executors.

        ``running`` tells the others that were started and have not ended, and where they run; None while on their way.
        It is asked only when it matters.
        """
        if not executors:
            return ()
        if not self._plan:
            self._plan = schedule_receivers(self._preferred, executors)
        planned = self._plan.get(receiver, ())
        found = tuple(each for each in planned if each in executors or isinstance(each, str))
        if not any(isinstance(each, Executor) for each in found):
            others = {
                other: Placement(self._latest.get(other, ()), executor)
                for other, executor in running().items()
                if other != receiver
            }
            found = reschedule_receiver(dict(self._preferred).get(receiver), others, executors)
        self._latest[receiver] = found
        return found
