"""The places that outputs have written to, as the ledger knows them: the concrete index behind each name.

A writer records the place in the counts of each batch, under `PLACE`. A person accepts another place by `accept`, which
leaves an event. Whichever is newer counts. A place is known by its server and name, not by an output's id.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.ledger.batches.results import LAST_MS
from headrace.ledger.states import EventKind

if TYPE_CHECKING:
    from headrace.elasticsearch.target import ConcreteIndex
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt, AttemptRow, BatchOutputRow
    from headrace.stream import ElasticsearchOutput

PLACE = "place"
PLACES = "places"
"""Beside the place, where every row has an index of its own: the place of each index that rows of the batch name."""
LETTERS = "letters"
"""Beside a place: the name of its dead-letter index and, if that is an alias, the concrete index."""
READERS = "readers"
"""Beside the counts too, and an attribute of an attempt: the schemas of a registry that its batch is read by: the
subject, its version and the digest of the schema, by input, decoder and subject."""
TRUNCATED_BELOW = "truncated_below"
"""Beside a place: the version below which truncates of the table have left no document there. Rows that are older and
come later, from another partition, are not written."""
_ROWS = 5
_ROWS_ANY = 20
_NEIGHBOURS = 100
_ACCEPTANCES = 50


def place_of(output: ElasticsearchOutput, index: ConcreteIndex | None) -> dict[str, Any]:
    """The output's place as JSON values: its server and name, and the concrete index behind the name; None if there is
    none."""
    server = output.connection or list(output.hosts)
    concrete, uuid = (None, None) if index is None else (index.name, index.uuid)
    return {"server": server, "name": output.index_text, "index": concrete, "uuid": uuid}


def written_places(output: ElasticsearchOutput, counts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The places that a batch was written to, by the output's counts; that of the definition if the counts have none.

    Where every row has an index of its own, there are as many as the batch's rows name. A batch that was written by an
    earlier version of headrace recorded the concrete index only.
    """
    if PLACES in counts:
        return list(counts[PLACES])
    recorded = counts.get(PLACE)
    if recorded is None and not output.names.is_plain:
        return []
    return [recorded if recorded is not None else {**place_of(output, None), "index": counts.get("index")}]


def newest_place(
    ledger: Ledger,
    stream_name: str,
    output: ElasticsearchOutput,
    *,
    batch_time_ms: int,
    interval_ms: int,
    target: str = "",
) -> Mapping[str, Any] | None:
    """The place of this output that was recorded or accepted last; None if no batch was written there.

    ``target`` is the name of a replay: only what it has written near the batch time counts then. The mark of truncates
    (`TRUNCATED_BELOW`) holds for an accepted place too, and in a replay that of the stream's own earlier batches.
    """
    found = _newest_place(ledger, stream_name, output, batch_time_ms, interval_ms, target)
    mark = _mark(ledger, stream_name, output, batch_time_ms, target, found) if output.truncates == "apply" else 0
    return {**(found or place_of(output, None)), TRUNCATED_BELOW: mark} if mark else found


def _mark(  # noqa: PLR0917
    ledger: Ledger,
    stream_name: str,
    output: ElasticsearchOutput,
    batch_time_ms: int,
    target: str,
    place: Mapping[str, Any] | None,
) -> int:
    until_ms = batch_time_ms - 1 if target else LAST_MS
    rows = ledger.attempts.newest_with(stream_name, [f'"{TRUNCATED_BELOW}"'], _ROWS, until_ms=until_ms)
    own = ((row.counts or {}).get(PLACE) for row in rows if row.output_id == output.step)
    return max((each.get(TRUNCATED_BELOW, 0) for each in (place, *own) if each), default=0)


def _newest_place(  # noqa: PLR0917
    ledger: Ledger,
    stream_name: str,
    output: ElasticsearchOutput,
    batch_time_ms: int,
    interval_ms: int,
    target: str,
) -> Mapping[str, Any] | None:
    wanted = place_of(output, None)

    def is_place(found: Any) -> bool:
        return isinstance(found, dict) and all(found.get(name) == wanted[name] for name in ("server", "name"))

    span_ms = _NEIGHBOURS * interval_ms
    near = (batch_time_ms - span_ms, batch_time_ms + span_ms) if target else (0, LAST_MS)
    # The databases write other characters than ASCII, and blanks, differently.
    name = json.dumps(output.index_text)
    texts = [f'"{PLACE}"', *([name] if "\\" not in name else [])]
    rows = ledger.attempts.newest_with(stream_name, texts, _ROWS, target=target, from_ms=near[0], until_ms=near[1])
    if not target:
        # An older batch may have been written again since.
        rows += ledger.attempts.newest_outputs(stream_name, _ROWS_ANY)
    newest = max((row for row in rows if any(map(is_place, _recorded_places(row)))), key=_recorded, default=None)
    since_ms = -1 if newest is None else newest.recorded_at_ms or 0
    for event in ledger.events.latest(stream_name, [EventKind.PLACE_ACCEPTED], _ACCEPTANCES):
        accepted = event.payload.get(PLACE)
        if event.at_ms >= since_ms and event.payload.get("target") == target and is_place(accepted):
            return accepted
    return None if newest is None else next(filter(is_place, _recorded_places(newest)))


def left_behind(ledger: Ledger, output: ElasticsearchOutput, claim: Attempt, names: Collection[str]) -> list[str]:
    """Indices where earlier attempts at the batch wrote documents, or may have, that are none of ``names``: what is
    there is not found again. Of attempts whose results are not known, the text of the definition's index.

    An output that has one index, before and now, is left out.
    """
    left: set[str] = set()
    at = claim.batch_time_ms
    written = ledger.attempts.newest_with(
        claim.stream, [f'"{PLACES}"'], _ROWS_ANY, target=claim.target, from_ms=at, until_ms=at
    )
    for result in written:
        if result.output_id == output.step:
            left |= {str(place["name"]) for place in result.counts[PLACES]}
    known = {result.attempt for result in written}
    for row in ledger.attempts.of_batch(claim.stream, at):
        if row.target != claim.target or row.number in known | {claim.number} or output.step not in row.outputs:
            continue
        before = _output_of(ledger, row, output.step)
        if before is not None and not (before.names.is_plain and output.names.is_plain):
            left |= {before.index_text} - {output.index_text}
    return sorted(left - set(names))


def _output_of(ledger: Ledger, row: AttemptRow, step: str) -> ElasticsearchOutput | None:
    """The output by the definition with which the attempt ran, as far as it can be read."""
    # Only a batch that runs again under other names needs it.
    from headrace.stream import Stream

    with contextlib.suppress(HeadraceError):
        definition = row.definition
        if definition is None and row.revision is not None:
            definition = ledger.streams.at_revision(row.stream, row.revision).definition
        stream = None if definition is None else Stream.from_json(definition)
        return next((each for each in stream.elasticsearch_outputs if each.step == step), None) if stream else None
    return None


def accept(ledger: Ledger, stream_name: str, place: Mapping[str, Any], *, by: str, target: str = "") -> None:
    """Let the next batches be written to this place; without an index, let them create it."""
    ledger.events.append(stream_name, EventKind.PLACE_ACCEPTED, {PLACE: dict(place), "target": target, "by": by})


def _recorded_places(row: BatchOutputRow) -> list[Any]:
    counts = row.counts or {}
    return [counts.get(PLACE), *counts.get(PLACES, ())]


def _recorded(row: BatchOutputRow) -> tuple[int, int]:
    return row.recorded_at_ms or 0, row.batch_time_ms
