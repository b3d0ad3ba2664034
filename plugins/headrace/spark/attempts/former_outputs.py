"""Former outputs: the ids under which earlier attempts at a batch wrote to the place that an output has now.

What was written is recorded under an output's step, its first id (`OutputDefinition.step`). A definition can give
another id to the same topic, index or folder without ``renamed_from``. Then the records of the former id are those of
the place, and the output with the new id must find them: otherwise a batch that runs again is sent to a topic twice.

Two outputs that one definition had at the same place, at any time, are two outputs, and neither is a former id of the
other.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from headrace.errors import Failure, HeadraceError
from headrace.ledger.states import EventKind
from headrace.stream import STATE_STEP, Output

if TYPE_CHECKING:
    from headrace.ledger.batches.tables import Attempt, AttemptRow, BatchRow
    from headrace.stream_context import StreamContext

_EVERY_REVISION = 1_000_000
_Place = tuple[str, str]


class AmbiguousOutputError(HeadraceError):
    """Several new outputs write to the place of an output that the definition no longer has."""

    failure = Failure.CODE


def former_steps(
    context: StreamContext, attempt: Attempt, batch: BatchRow, earlier: Iterable[AttemptRow]
) -> dict[str, tuple[str, ...]]:
    """The former steps of the attempt's outputs, by their steps. Outputs without any are left out.

    ``earlier`` are the earlier attempts at the batch, or at its replay. The server of a place is not compared: it can
    be named by another connection. Whether it is the same topic or index, the writer finds by its id.

    Raises AmbiguousOutputError.
    """
    rows = list(earlier)
    rebuilt = not attempt.target and _is_from_before_a_rebuild(context, batch)
    same_definition = not attempt.target and all(row.revision == attempt.revision for row in rows)
    if not rebuilt and (not rows or same_definition):
        return {}
    # Oldest first: of two new outputs, the one that was declared first has taken the former one's place.
    texts = (
        dict.fromkeys(row.definition for row in rows if row.definition)
        if attempt.target
        else [row.definition for row in context.ledger.streams.newest_revisions(attempt.stream, _EVERY_REVISION)]
    )
    declared = [_steps_at(text) for text in texts]
    present = {output.step: place for output in context.stream.outputs if (place := _place_of(output)) is not None}
    declared.append(_by_place(present.items()))
    tried = {step for row in rows for step in row.outputs}
    if rebuilt:
        # Its attempts may be lost.
        tried.update(step for steps_at in declared for steps in steps_at.values() for step in steps)
    former: dict[str, list[str]] = {}
    for place in dict.fromkeys(present.values()):
        at_place = [steps_at.get(place, frozenset()) for steps_at in declared]
        now = at_place[-1]
        for step in sorted(tried.intersection(*[frozenset().union(*at_place)]) - now - {STATE_STEP}):
            heir = _heir(context, step, place, at_place)
            if heir in attempt.outputs:
                former.setdefault(heir, []).append(step)
    return {step: tuple(steps) for step, steps in former.items()}


def _heir(context: StreamContext, step: str, place: _Place, at_place: list[frozenset[str]]) -> str | None:
    """The present output that has taken the place of this step; None if it was beside all of them."""
    together = frozenset().union(*(steps for steps in at_place if step in steps))
    began = {
        other: next(number for number, steps in enumerate(at_place) if other in steps)
        for other in at_place[-1] - together
    }
    first = sorted(other for other, number in began.items() if number == min(began.values()))
    if len(first) > 1:
        raise AmbiguousOutputError(
            f"Outputs {' and '.join(first)} of stream {context.name!r} write to {' '.join(place)}, to which the batch "
            f"may have been written as output {step!r}, which the definition no longer has. It does not say which of "
            "them has taken its place.",
            remedy=f"Give that one renamed_from={step!r}.",
        )
    return first[0] if first else None


def _is_from_before_a_rebuild(context: StreamContext, batch: BatchRow) -> bool:
    rebuilt = context.ledger.events.latest(context.name, [EventKind.LEDGER_REBUILT], limit=1)
    return bool(rebuilt) and batch.allocated_at_ms <= rebuilt[0].at_ms


def _steps_at(definition: str) -> dict[_Place, frozenset[str]]:
    """The steps of a definition's outputs by their places, without outputs that can no longer be read."""
    return _by_place(
        (output.step, place)
        for output in _outputs_of(json.loads(definition).get("outputs") or ())
        if (place := _place_of(output)) is not None
    )


def _outputs_of(fields: Iterable[object]) -> Iterator[Output]:
    one: TypeAdapter[Output] = TypeAdapter(Output)
    for each in fields:
        with contextlib.suppress(ValidationError, HeadraceError):
            yield one.validate_json(json.dumps(each))


def _by_place(steps: Iterable[tuple[str, _Place]]) -> dict[_Place, frozenset[str]]:
    by_place: dict[_Place, set[str]] = {}
    for step, place in steps:
        by_place.setdefault(place, set()).add(step)
    return {place: frozenset(found) for place, found in by_place.items()}


def _place_of(output: Output) -> _Place | None:
    places = output.places
    return (places[0].kind, places[0].name) if places else None
