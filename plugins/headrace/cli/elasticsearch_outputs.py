"""Finds a stream's Elasticsearch outputs and their clusters, for commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.elasticsearch.administration import Administration
    from headrace.ledger import Ledger
    from headrace.stream import ElasticsearchOutput, Stream

MAX_RETRY_SECONDS = 30.0
"""How long a command waits for Elasticsearch: a person waits for the command."""


class NoSuchOutputError(HeadraceError):
    """The stream has no such Elasticsearch output."""


def registered(ledger: Ledger, name: str) -> Stream:
    """The stream as the ledger has it. Raises what ``ledger.streams.get`` raises."""
    from headrace.stream import Stream

    return Stream.from_json(ledger.streams.get(name).definition)


def elasticsearch_outputs(stream: Stream, output: str | None) -> list[ElasticsearchOutput]:
    """The Elasticsearch output with this id, in a list; None: all Elasticsearch outputs.

    Raises:
        NoSuchOutputError: there is no such output, or it is of another kind.
    """
    from headrace.stream import ElasticsearchOutput

    found = [each for each in stream.outputs if isinstance(each, ElasticsearchOutput) and output in (None, each.id)]
    if not found:
        kinds = ", ".join(f"{each.id} ({each.kind})" for each in stream.outputs)
        wanted = "no Elasticsearch output" if output is None else f"no Elasticsearch output {output!r}"
        raise NoSuchOutputError(f"Stream {stream.name!r} has {wanted}; its outputs are {kinds}.")
    return found


def administration_of(output: ElasticsearchOutput, *, max_retry_seconds: float = MAX_RETRY_SECONDS) -> Administration:
    """The administration of the output's cluster, to be closed. Raises the errors of looking up its connection."""
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.transport import Cluster

    return Administration.of(
        Cluster.of(output), timeout_seconds=output.request_timeout_seconds, max_retry_seconds=max_retry_seconds
    )
