"""Decides on which executors a stream's receivers start, while executors come and go."""

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
    """Keeps the plan made for all receivers when the first of them started, as Spark's tracker does.

    A receiver that restarts follows the plan while one of its planned executors lives; otherwise it is placed again
    beside the others. In a job of several streams, the receivers of a stream that starts beside others are placed one
    after the other, without a plan.
    """

    def __init__(self, stream: Stream) -> None:
        self._preferred: list[tuple[ReceiverId, str | None]] = []
        for source in stream.inputs:
            hosts = source.preferred_hosts
            for index in range(source.receivers):
                # One host for all receivers, or one for each.
                host = hosts[min(index, len(hosts) - 1)] if hosts else None
                self._preferred.append((ReceiverId(stream.name, source.id, index), host))
        self._plan: dict[ReceiverId, tuple[Location, ...]] = {}
        self._latest: dict[ReceiverId, tuple[Location, ...]] = {}

    def candidates(
        self,
        receiver: ReceiverId,
        executors: Collection[Executor],
        running: Callable[[], Mapping[ReceiverId, Executor | None]],
        elsewhere: Mapping[ReceiverId, Placement] | None = None,
    ) -> tuple[Location, ...]:
        """Return where to start ``receiver``; empty (no preference) without executors.

        ``running`` returns the receivers that were started and have not ended, each with its executor, or None while it
        has none yet. It is called only when needed. ``elsewhere`` are the receivers of other streams in the job.
        """
        if not executors:
            return ()
        if not self._plan and not elsewhere:
            self._plan = schedule_receivers(self._preferred, executors)
        planned = self._plan.get(receiver, ())
        found = tuple(each for each in planned if each in executors or isinstance(each, str))
        if not any(isinstance(each, Executor) for each in found):
            others = {
                other: Placement(self._latest.get(other, ()), executor)
                for other, executor in running().items()
                if other != receiver
            }
            beside = {**others, **(elsewhere or {})}
            found = reschedule_receiver(dict(self._preferred).get(receiver), beside, executors)
        self._latest[receiver] = found
        return found
