"""The places that outputs have written to, as the ledger knows them: the concrete index behind each name.

A writer records the place in the counts of each batch, under `PLACE`. A person accepts another place by `accept`, which
leaves an event. Whichever is newer counts. A place is known by its server and name, not by an output's id.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.ledger.batches.results import LAST_MS
from headrace.ledger.states import EventKind

if TYPE_CHECKING:
    from headrace.elasticsearch.target import ConcreteIndex
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt, AttemptRow, BatchOutputRow
    from headrace.ledger.tables import EventRow
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
TRUNCATED_BELOW_THEN = "truncated_below_then"
"""Beside it: the same, without the truncates of later batch times, which a batch that is run again knows too. Only this
counts for replays. Results of headrace before it have none: there both are the same."""
_ROWS = 5
_ROWS_ANY = 20
_NEIGHBOURS = 100
_SEARCHED = 5
"""Names that the database searches for. To read the counts takes about as long as to search them for so many."""
_ACCEPTANCES = 100
"""Accepted places that are read at once."""
_ESCAPED = re.compile(r"\\.|[^ -~]+")


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

    ``target`` is the name of a replay: only what it has written near the batch time counts then. The marks of truncates
    (`TRUNCATED_BELOW`) are those of all that was written to this server and name, whatever index is behind it; in a
    replay also those that the stream's own earlier batches left where it has this batch.
    """
    name = output.index_text
    of_batch: dict[str, Any] = {"batch_time_ms": batch_time_ms, "interval_ms": interval_ms, "target": target}
    found = newest_places(ledger, stream_name, output, [name], **of_batch).get(name)
    place = dict(found or place_of(output, None))
    marked = place.pop(TRUNCATED_BELOW, 0)
    place.pop(TRUNCATED_BELOW_THEN, 0)
    # Truncates that were applied hold also if the definition has given up to apply them, but by these versions only.
    if output.truncates == "apply" or (marked and output.version == "column"):
        below, then = _marks(ledger, stream_name, output, batch_time_ms, target)
        if below:
            return {**place, TRUNCATED_BELOW: below, TRUNCATED_BELOW_THEN: then}
    return None if found is None else place


def _marks(
    ledger: Ledger, stream_name: str, output: ElasticsearchOutput, batch_time_ms: int, target: str
) -> tuple[int, int]:
    """`TRUNCATED_BELOW` and `TRUNCATED_BELOW_THEN` of the output's place."""
    if not ledger.attempts.newest_with(stream_name, [f'"{TRUNCATED_BELOW}"'], 1, target=None, until_ms=LAST_MS):
        return 0, 0
    place = place_of(output, None)
    # A stream may go on in the index of one of its replays. A replay begins with an index of its own.
    by: dict[str, Any] = {"target": target or None}
    below = max((mark[TRUNCATED_BELOW] for mark in _marked(ledger, stream_name, place, LAST_MS, **by)), default=0)
    then = _then(_marked(ledger, stream_name, place, batch_time_ms, **by)) if below else 0
    if not target:
        return below, then
    rows = ledger.attempts.newest_with(
        stream_name, [f'"{PLACE}"'], _ROWS, output_id=output.step, until_ms=batch_time_ms
    )
    there = next((row.counts[PLACE] for row in rows if PLACE in row.counts), None)
    if there is not None:
        then = max(then, _then(_marked(ledger, stream_name, there, batch_time_ms - 1, target="")))
    return max(below, then), then


def _then(marks: Iterable[Mapping[str, Any]]) -> int:
    return max((mark.get(TRUNCATED_BELOW_THEN, mark[TRUNCATED_BELOW]) for mark in marks), default=0)


def _marked(
    ledger: Ledger, stream_name: str, place: Mapping[str, Any], until_ms: int, *, target: str | None
) -> Iterator[Mapping[str, Any]]:
    """The recorded places of this server and name with the greatest marks of batches up to ``until_ms``.

    Batches run in order, and each takes over the marks of those before it, so the newest of them has the greatest; but
    one that was run again may have found a truncate that later ones had not seen.
    """
    of: dict[str, Any] = {"target": target, "until_ms": until_ms}
    found: list[Any] = []
    server: str | list[str] = place["server"]
    # The list of hosts may have got other nodes of the cluster since, and one may be written in another way.
    for of_server in (
        [f'"{server}"'] if isinstance(server, str) else [host.split("//")[-1].strip("/") for host in server]
    ):
        texts = _plain([f'"{TRUNCATED_BELOW}"', json.dumps(place["name"]), of_server])
        rows = ledger.attempts.newest_with(stream_name, texts, _ROWS_ANY, **of)
        found += [(row.counts or {}).get(PLACE) for row in rows]
        found += ledger.attempts.repeated_with(stream_name, PLACE, texts, **of)
    return (each for each in found if _is_of_cluster(each, place) and TRUNCATED_BELOW in each)


def _server_texts(server: str | list[str]) -> list[str]:
    """What JSON of this server contains: see `Attempts.newest_with`."""
    return _plain([f'"{server}"'] if isinstance(server, str) else [f'["{server[0]}"', f'"{server[-1]}"]'])


def _plain(texts: Iterable[str]) -> list[str]:
    """Those that the databases write alike: other characters than ASCII, and blanks, they write differently."""
    return [text for text in texts if text.isascii() and "\\" not in text]


def _is_of_cluster(found: Any, place: Mapping[str, Any]) -> bool:
    """Whether both are of one name, and of one server or of lists of hosts with a common one."""
    from headrace.stream.outputs import host_address

    if not isinstance(found, dict) or found.get("name") != place["name"]:
        return False
    servers = (found.get("server"), place["server"])
    hosts = [set(map(host_address, server)) for server in servers if isinstance(server, list)]
    return not hosts[0].isdisjoint(hosts[1]) if len(hosts) == 2 else servers[0] == servers[1]


def newest_places(
    ledger: Ledger,
    stream_name: str,
    output: ElasticsearchOutput,
    names: Collection[str],
    *,
    batch_time_ms: int,
    interval_ms: int,
    target: str = "",
) -> dict[str, Mapping[str, Any]]:
    """The places of these names on the output's server that were recorded or accepted last, by name; without those to
    which no batch was written.

    ``target``: as in `newest_place`. The results are read once for all names, the newest batch times first, until each
    name is found: a name that is new costs a pass over all of them.
    """
    server = place_of(output, None)["server"]
    span_ms = _NEIGHBOURS * interval_ms
    from_ms, until_ms = (batch_time_ms - span_ms, batch_time_ms + span_ms) if target else (0, LAST_MS)
    missing, recorded = set(names), dict[str, tuple[tuple[int, int], Mapping[str, Any]]]()
    while missing:
        any_of = list(map(_text_of, missing)) if len(missing) <= _SEARCHED else []
        of: dict[str, Any] = {"any_of": any_of, "target": target, "from_ms": from_ms, "until_ms": until_ms}
        rows = ledger.attempts.newest_with(stream_name, [f'"{PLACE}"', *_server_texts(server)], _ROWS_ANY, **of)
        # An older batch may have been written again since.
        for row in sorted(rows, key=_recorded):
            # The first of a row counts.
            for place in reversed(_recorded_places(row)):
                if isinstance(place, dict) and place.get("server") == server and place.get("name") in missing:
                    recorded[place["name"]] = (_recorded(row), place)
        missing -= recorded.keys()
        if len(rows) < _ROWS_ANY:
            break
        last_ms = rows[-1].batch_time_ms
        until_ms = last_ms if last_ms < rows[0].batch_time_ms else last_ms - 1
    places = {name: place for name, (_, place) in recorded.items()}
    since = {name: recorded[name][0][0] if name in recorded else -1 for name in names}
    for event in _acceptances(ledger, stream_name, min(since.values(), default=LAST_MS)):
        accepted = event.payload.get(PLACE)
        if not isinstance(accepted, dict) or event.payload.get("target") != target or accepted.get("server") != server:
            continue
        # The newest acceptance of a name counts.
        if event.at_ms >= since.get(str(accepted.get("name")), LAST_MS + 1):
            places[accepted["name"]] = accepted
            since[accepted["name"]] = LAST_MS + 1
    return places


def _acceptances(ledger: Ledger, stream_name: str, since_ms: int) -> Iterator[EventRow]:
    """The events of accepted places since then, the newest first."""
    before_id = None
    while page := ledger.events.latest(stream_name, [EventKind.PLACE_ACCEPTED], _ACCEPTANCES, before_id=before_id):
        for event in page:
            if event.at_ms < since_ms:
                return
            yield event
        before_id = page[-1].event_id


def _text_of(name: str) -> str:
    """What JSON of this name contains, however a database writes it: its longest part that is not escaped."""
    return max(_ESCAPED.split(json.dumps(name, ensure_ascii=False)), key=len)


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
