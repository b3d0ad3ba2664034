"""Renders the metrics of the streams in some ledgers, in the format that the scraper asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable

from prometheus_client.exposition import choose_encoder

from headrace.errors import HeadraceError
from headrace.ledger.errors import LedgerUrlError
from headrace.ledger.overviews import StreamNumbers
from headrace.metrics.collector import add_stream
from headrace.metrics.families import Families

logger = logging.getLogger(__name__)

Read = Callable[[str], list[StreamNumbers]]


def render(
    ledgers: Iterable[str],
    *,
    read: Read,
    accept: str = "",
    may_read: Callable[[str, str], bool] = lambda *_: True,
    declared: Collection[tuple[str, str]] = (),
    shows_ledger: Callable[[str], bool] = lambda _: True,
) -> tuple[bytes, str]:
    """Return the exposition and its content type.

    A ledger that does not answer has ``headrace_ledger_up`` 0 and no streams; the others are still shown. If two
    ledgers have a stream of the same name, the first declared one that may be read is shown, or the first one if none
    is declared: a sample may appear only once.

    Args:
        ledgers: their references.
        read: returns the readings of a ledger; it raises a HeadraceError if that does not answer.
        accept: the request's Accept header: the text format, or OpenMetrics.
        may_read: whether a stream, by its ledger's reference and its name, is shown.
        declared: the streams that DAGs declare, by their ledger's reference and their name. A stream that moved to
            another ledger has left a row in the first one.
        shows_ledger: whether a ledger, by its reference, is shown even if none of its streams may be read.
    """
    families, shown, seen = Families(), list[tuple[str, StreamNumbers]](), set[str]()
    labels = _labels(ledgers)
    for number, url in enumerate(labels):
        began = time.monotonic()
        try:
            readings = read(url)
        except HeadraceError as error:
            # A reference that is refused may hold a password.
            label = f"invalid {number}" if isinstance(error, LedgerUrlError) else labels[url]
            logger.warning("The metrics of ledger %s cannot be read: %s", label, error)
            if shows_ledger(url):
                families.add("headrace_ledger_up", (label,), 0)
            continue
        readable = [(url, reading) for reading in readings if may_read(url, reading.stream.name)]
        if readable or shows_ledger(url):
            families.add("headrace_ledger_up", (labels[url],), 1)
            families.add("headrace_ledger_scrape_seconds", (labels[url],), time.monotonic() - began)
        shown += readable
    for url, reading in sorted(shown, key=lambda each: (each[0], each[1].stream.name) not in declared):
        name = reading.stream.name
        if name in seen:
            logger.warning("Stream %s of ledger %s has the name of another ledger's stream.", name, url)
            continue
        seen.add(name)
        add_stream(families, reading)
    encode, content_type = choose_encoder(accept)
    return encode(families), content_type


def _labels(ledgers: Iterable[str]) -> dict[str, str]:
    """Each ledger's label. One that another ledger has gets its number: two samples of one label are an error."""
    found: dict[str, str] = {}
    for number, reference in enumerate(dict.fromkeys(ledgers)):
        label = _without_login(reference)
        found[reference] = f"{label} {number}" if label in found.values() else label
    return found


def _without_login(reference: str) -> str:
    """The reference, without the login and the options of a URL."""
    scheme, separator, rest = reference.partition("://")
    if not separator or scheme.startswith("sqlite"):
        return reference
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
