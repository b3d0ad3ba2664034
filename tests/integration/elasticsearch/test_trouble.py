"""What a real Elasticsearch refuses, for now or for good, and what it does when it is killed in the middle."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headrace.clock import SystemClock
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import ElasticsearchRefusedError, ElasticsearchUnavailableError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.open_target import OpenTarget
from headrace.elasticsearch.retry_budget import RetryBudget
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport
from headrace.elasticsearch.verdicts import Reason
from headrace.elasticsearch.version_conflicts import VersionConflicts

# What the mapping or its settings cannot take: (properties, settings, the document's fields).
CONFLICTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "text for a number": ({"f": {"type": "long"}}, {}, {"f": "many"}),
    "an object for a number": ({"f": {"type": "long"}}, {}, {"f": {"g": 1}}),
    "a number for an object": ({"f": {"properties": {"g": {"type": "long"}}}}, {}, {"f": 1}),
    "a number out of range": ({"f": {"type": "integer"}}, {}, {"f": 2**40}),
    "no date": ({"f": {"type": "date"}}, {}, {"f": "yesterday"}),
    "no boolean": ({"f": {"type": "boolean"}}, {}, {"f": "maybe"}),
    "no address": ({"f": {"type": "ip"}}, {}, {"f": "1.2.3"}),
    "no bytes": ({"f": {"type": "binary"}}, {}, {"f": {"g": 1}}),
    "a term that is too long": ({"f": {"type": "keyword"}}, {}, {"f": "x" * 33_000}),
    "a dotted name through a number": ({"f": {"type": "long"}}, {}, {"f.g": 1}),
    "too many fields": ({"f": {"type": "long"}}, {"index.mapping.total_fields.limit": 3}, dict.fromkeys("ghij", 1)),
    "too deep": ({"f": {"type": "long"}}, {"index.mapping.depth.limit": 2}, {"g": {"h": {"i": 1}}}),
    "a name that is too long": ({}, {"index.mapping.field_name_length.limit": 40}, {"f" * 41: 1}),
}


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_only_a_document_against_the_mapping_is_a_dead_letter(real: Any, rows: Any, conflict: str) -> None:
    properties, settings, document = CONFLICTS[conflict]
    good = {"ok": {"type": "long"}, **properties}
    real.ask("PUT", f"/{real.name}", {"mappings": {"properties": good}, "settings": settings})
    counts = real.index(rows([b'{"ok": 1}', json.dumps(document).encode(), b'{"ok": 2}']))
    assert (counts.created, counts.dead_lettered, counts.retries) == (2, 1, 0)
    (letter,) = real.documents(f"{real.name}-dead-letters").values()
    assert json.loads(letter["value_text"]) == document
    assert letter["document_id"] == "t+0+1"


def test_a_field_unknown_to_a_strict_mapping_is_a_dead_letter(real: Any, rows: Any) -> None:
    mappings = {"dynamic": "strict", "properties": {"ok": {"type": "long"}}}
    real.ask("PUT", f"/{real.name}", {"mappings": mappings})
    counts = real.index(rows([b'{"ok": 1}', b'{"new": 1}']))
    assert counts.dead_letter_reasons == {"strict_dynamic_mapping_exception": 1}
    assert counts.created == 1


def test_later_documents_conflict_with_the_first_ones_mapping(real: Any, rows: Any) -> None:
    counts = real.index(rows([b'{"n": 1}', b'{"n": "x"}', b'{"n": {"m": 1}}', b'{"n": 2}']))
    assert (counts.created, counts.dead_lettered) == (2, 2)
    assert real.index(rows([b'{"n": 1}', b'{"n": "x"}', b'{"n": {"m": 1}}', b'{"n": 2}'])).repeated == 2


# What makes the index refuse every document, and the remedy that is named: (method, path, body), with I for the index.
INDEX_FAULTS: dict[str, tuple[list[tuple[str, str, Any]], str]] = {
    "a routing is required": ([("PUT", "/I", {"mappings": {"_routing": {"required": True}}})], "take _routing out"),
    "its pipeline is missing": (
        [("PUT", "/I", {"settings": {"index.default_pipeline": "no-such"}})],
        "Create the pipe",
    ),
    "it is closed": ([("PUT", "/I", None), ("POST", "/I/_close", None)], "Open the index"),
    "no index of its alias is written to": (
        [("PUT", "/I-a", {"aliases": {"I": {}}}), ("PUT", "/I-b", {"aliases": {"I": {}}})],
        "its write index",
    ),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_an_index_fault_fails_the_batch_without_a_dead_letter(real: Any, rows: Any, fault: str) -> None:
    steps, remedy = INDEX_FAULTS[fault]
    for method, path, body in steps:
        named = None if body is None else json.loads(json.dumps(body).replace('"I"', f'"{real.name}"'))
        real.ask(method, path.replace("I", real.name), named)
    with pytest.raises(ElasticsearchRefusedError, match=remedy):
        real.index(rows([b'{"n": 1}', b'{"n": 2}']), max_retry_seconds=5)
    assert not real.ask("GET", f"/{real.name}-dead-letters*/_settings")


@pytest.fixture
def through_a_pipeline(real: Any) -> None:
    """Each document's field "do" says what the index's pipeline does to it."""
    if shutil.which("javac") is None:
        pytest.skip("no javac: the JDK compiles the pipeline's processor")
    real.ask("PUT", "/_ingest/pipeline/acting", {"processors": [{"act": {}}]})
    real.ask("PUT", f"/{real.name}", {"settings": {"index.default_pipeline": "acting", "index.number_of_shards": 3}})


ILLEGAL = "java.lang.IllegalArgumentException"
# What processors of Elasticsearch 8.19 raise over one document's value: (class, text).
PROCESSORS = {
    "rename": (ILLEGAL, "field [b] already exists"),
    "convert": (ILLEGAL, "[maybe] is not a boolean value, cannot convert to boolean"),
    "dot_expander": (ILLEGAL, "cannot expand [a.b], because [a] is not an object field, but a value field"),
    "kv": (ILLEGAL, "field [m] does not contain value_split [=]"),
    "json": (ILLEGAL, "com.fasterxml.jackson.core.JsonParseException: Unrecognized token 'x'"),
    "uri_parts": (ILLEGAL, "unable to parse URI [:]"),
    "urldecode": (ILLEGAL, 'URLDecoder: Illegal hex characters in escape (%) pattern - not a hexadecimal digit: "z"'),
    "geoip": (ILLEGAL, "'x' is not an IP string literal."),
    "csv": (ILLEGAL, "Illegal character inside unquoted field at 1"),
    "script": ("script", "runtime error"),
    "date": (ILLEGAL, "unable to parse date [x]"),
    "grok": (ILLEGAL, "Provided Grok expressions do not match field value: [x]"),
    "a missing field": (ILLEGAL, "field [m] doesn't exist"),
    "split": (ILLEGAL, "field [m] of type [java.lang.Integer] cannot be cast to [java.lang.String]"),
    "foreach": ("java.lang.ClassCastException", "class java.lang.String cannot be cast to class java.util.List"),
    "sort": ("java.lang.NullPointerException", 'because "value" is null'),
    "a date's field": ("java.time.DateTimeException", "no such month"),
}


def refused_by(processor: str) -> bytes:
    kind, text = PROCESSORS[processor]
    return json.dumps({"do": {"throw": kind, "text": text}}).encode()


@pytest.mark.usefixtures("through_a_pipeline")
def test_only_documents_a_processor_refuses_are_dead_letters(real: Any, rows: Any) -> None:
    bad = [refused_by(processor) for processor in PROCESSORS]
    counts = real.index(rows([value for each in bad for value in (each, b'{"n": 1}')]))
    assert (counts.created, counts.dead_lettered, counts.retries) == (len(bad), len(bad), 0)
    letters = real.documents(f"{real.name}-dead-letters")
    assert {letter["document_id"] for letter in letters.values()} == {f"t+0+{2 * n}" for n in range(len(bad))}
    assert len(real.documents()) == len(bad)
    alone = real.index(rows([refused_by("kv")], first=100))
    assert alone.dead_lettered == 1, "the index has taken others"


@pytest.mark.usefixtures("through_a_pipeline")
def test_a_pipeline_that_no_document_passes_fails_the_batch(real: Any, rows: Any) -> None:
    """The error names one of the documents."""
    with pytest.raises(ElasticsearchRefusedError, match=r"all 40 documents .* 't\+0\+0' \(t, partition 0, offset 0\)"):
        real.index(rows([refused_by("script")] * 40), bulk_actions=10, requests_in_flight=1)
    assert not real.ask("GET", f"/{real.name}-dead-letters*/_settings")


@pytest.mark.parametrize("moved", ["_index", "_id"])
@pytest.mark.usefixtures("through_a_pipeline")
def test_a_pipeline_that_moves_a_document_is_refused_at_once(real: Any, rows: Any, moved: str) -> None:
    """At its first answer, and what it wrote elsewhere is taken back."""
    elsewhere = f"{real.name}-2026"
    values = [b'{"n": 1}', json.dumps({"do": {moved: elsewhere}}).encode()]
    with pytest.raises(ElasticsearchRefusedError, match=rf"Document 't\+0\+1' .*{elsewhere}"):
        real.index(rows(values))
    # What the pipeline wrote elsewhere was taken back, so that further tries leave nothing there.
    assert set(real.documents(f"{real.name}*")) == {"t+0+0"}
    real.ask("POST", "/_aliases", {"actions": [{"add": {"index": real.name, "alias": f"{real.name}-by-alias"}}]})
    by_alias = real.index(rows([b'{"n": 1}', b'{"n": 2}'], first=2), index=f"{real.name}-by-alias")
    assert by_alias.created == 2, "an alias's index has another name, and is the place asked for"
    with pytest.raises(ElasticsearchRefusedError, match="changes _index or _id"):
        real.index(rows(values), index=f"{real.name}-by-alias")


def test_a_missing_shard_is_reported_before_the_client_gives_up(
    real: Any, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Elasticsearch itself would wait for a minute, and the client for as long."""
    nowhere = {"index.routing.allocation.require.name": "nowhere"}
    real.ask("PUT", f"/{real.name}?wait_for_active_shards=0", {"settings": nowhere})
    began = time.monotonic()
    with pytest.raises(ElasticsearchUnavailableError, match="primary shard is not active"):
        real.index(rows([b'{"n": 1}']), max_retry_seconds=1, request_timeout_seconds=60)
    assert time.monotonic() - began < 50


def lifted(real: Any, method: str, path: str, body: Any, after_seconds: float = 1.0) -> threading.Timer:
    timer = threading.Timer(after_seconds, lambda: real.ask(method, path, body))
    timer.start()
    return timer


INDEX_BLOCKS = ["index.blocks.read_only_allow_delete", "index.blocks.write", "index.blocks.read_only"]


@pytest.mark.parametrize("block", INDEX_BLOCKS)
def test_a_read_only_index_is_waited_for_and_nothing_is_lost(real: Any, rows: Any, block: str) -> None:
    real.ask("PUT", f"/{real.name}", {"settings": {block: True}})
    path = f"/{real.name}/_settings"
    timer = lifted(real, "PUT", path, {block: None})
    counts = real.index(rows([b'{"n": %d}' % n for n in range(100)]), bulk_actions=10, max_retry_seconds=60)
    timer.join()
    assert (counts.created, counts.dead_lettered) == (100, 0)
    assert counts.retries > 0


@pytest.mark.parametrize("block", ["cluster.blocks.read_only_allow_delete", "cluster.blocks.read_only"])
def test_a_read_only_cluster_is_waited_for(real: Any, rows: Any, block: str) -> None:
    real.ask("PUT", "/_cluster/settings", {"persistent": {block: True}})
    timer = lifted(real, "PUT", "/_cluster/settings", {"persistent": {block: None}})
    try:
        counts = real.index(rows([b'{"n": 1}', b"junk"]), max_retry_seconds=60)
    finally:
        timer.join()
    assert (counts.created, counts.dead_lettered) == (1, 1)
    assert counts.retries > 0


def test_a_conflict_is_judged_once_the_shard_is_there_again(real: Any, rows: Any) -> None:
    """As after a restart: the shard is not assigned for a while."""
    batch = rows([b'{"n": 1}', b'{"n": 2}'])
    assert real.index(batch).created == 2
    settings, nowhere = f"/{real.name}/_settings", "index.routing.allocation.require._name"
    counts = IndexingCounts()
    conflicts = VersionConflicts(real.transport, real.options(), counts, partial(OpenTarget, real.transport))
    prepared = prepare_rows(batch, real.options()).prepared
    assert prepared is not None
    for line in range(2):
        conflicts.take(prepared, line, Reason("version_conflict_engine_exception", ""), may_be_ours=False)
    real.ask("POST", f"/{real.name}/_close")
    real.ask("PUT", settings, {nowhere: "no-such-node"})
    real.ask("POST", f"/{real.name}/_open?wait_for_active_shards=0")
    timer = lifted(real, "PUT", settings, {nowhere: None}, after_seconds=2.0)
    budget = RetryBudget("It", max_seconds=60, clock=SystemClock(), cancelled=threading.Event())
    conflicts.settle(prepared, budget)
    timer.join()
    assert (counts.repeated, counts.superseded) == (2, 0)


def test_a_circuit_breaker_is_waited_for(real: Any, rows: Any) -> None:
    """429 for whole requests, as long as they are larger than what is left."""
    limit = "network.breaker.inflight_requests.limit"
    real.ask("PUT", "/_cluster/settings", {"persistent": {limit: "1kb"}})
    timer = lifted(real, "PUT", "/_cluster/settings", {"persistent": {limit: None}})
    try:
        counts = real.index(rows([b'{"n": "%s"}' % (b"x" * 500)] * 10), max_retry_seconds=1)
    finally:
        timer.join()
    assert (counts.created, counts.dead_lettered, counts.retries) == (10, 0, 0)
    assert counts.throttled_requests > 0


def test_a_server_short_of_memory_gets_smaller_requests(real: Any, rows: Any) -> None:
    """429 for requests above a few hundred kilobytes, all the time. No document is at fault."""
    limit = "network.breaker.inflight_requests.limit"
    real.ask("PUT", "/_cluster/settings", {"persistent": {limit: "800kb"}})
    try:
        counts = real.index(rows([b'{"n": %d, "x": "%s"}' % (n, b"x" * 500) for n in range(4000)]))
    finally:
        real.ask("PUT", "/_cluster/settings", {"persistent": {limit: None}})
    assert (counts.created, counts.dead_lettered, counts.retries) == (4000, 0, 0)
    assert counts.throttled_requests >= 2
    assert counts.throttled_seconds > 0
    assert sorted(document["n"] for document in real.documents().values()) == list(range(4000))


def test_dead_letters_wait_for_their_index_too(real: Any, rows: Any) -> None:
    letters = f"{real.name}-dead-letters"
    real.ask("PUT", f"/{letters}", {"settings": {"index.blocks.write": True}})
    timer = lifted(real, "PUT", f"/{letters}/_settings", {"index.blocks.write": None})
    counts = real.index(rows([b"junk"]), max_retry_seconds=60)
    timer.join()
    assert counts.dead_lettered == 1
    assert set(real.documents(letters)) == {f"{real.name}/t+0+0"}


def test_a_batch_fails_if_its_dead_letters_cannot_be_written(real: Any, rows: Any) -> None:
    """Nothing is dropped: the next try is whole."""
    letters = f"{real.name}-dead-letters"
    real.ask("PUT", f"/{letters}", {"settings": {"index.blocks.write": True}})
    batch = rows([b'{"n": 1}', b"junk"])
    with pytest.raises(ElasticsearchUnavailableError, match="Nothing was dropped"):
        real.index(batch, max_retry_seconds=0.2)
    real.ask("PUT", f"/{letters}/_settings", {"index.blocks.write": None})
    counts = real.index(batch)
    assert (counts.repeated, counts.dead_lettered) == (1, 1)


def test_a_shard_that_is_nowhere_is_waited_for(real: Any, rows: Any) -> None:
    """Requests for it hang until they time out, and what became of them is unknown."""
    nowhere = {"index.routing.allocation.require._name": "no such node"}
    real.ask("PUT", f"/{real.name}?wait_for_active_shards=0", {"settings": nowhere})
    timer = lifted(real, "PUT", f"/{real.name}/_settings", dict.fromkeys(nowhere), after_seconds=2)
    options = real.options(max_retry_seconds=60)
    transport = ElasticsearchTransport(Cluster.of(options), connections=2, timeout_seconds=1)
    try:
        counts = Indexer(transport, options).index([rows([b'{"n": %d}' % n for n in range(20)])])
    finally:
        timer.join()
        transport.close()
    assert counts.created + counts.repeated == 20
    assert counts.retries > 0
    assert {version for version, _ in real.versions().values()} == {1}
    assert len(real.documents()) == 20


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticsearchServer]:
    """A server of this module's own, to kill."""
    with ElasticsearchServer(tmp_path_factory.mktemp("elasticsearch"), heap="512m") as server:
        yield server


class Interrupted:
    """A transport that calls ``interrupt`` before its ``at``-th bulk request."""

    def __init__(self, transport: Any, at: int, interrupt: Callable[[], object]) -> None:
        self._transport = transport
        self._left = at
        self._interrupt = interrupt
        self._lock = threading.Lock()

    def request(self, method: str, path: str, body: bytes | None = None) -> Any:
        with self._lock:
            if "_bulk" in path:
                self._left -= 1
                if self._left == 0:
                    self._interrupt()
        return self._transport.request(method, path, body)

    def close(self) -> None:
        self._transport.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "hanging"])
def test_a_server_gone_for_a_while_delays_but_loses_nothing(
    own_server: ElasticsearchServer, real_index: Any, rows: Any, fault: str
) -> None:
    real = real_index(own_server.url, f"gone-{fault}")
    batch = rows([b'{"n": %d}' % n if n % 100 else b"junk" for n in range(3000)])
    back: list[threading.Thread] = []

    def comes_back() -> None:
        if fault == "killed":
            own_server.start()
        else:
            time.sleep(3)
            own_server.resume()

    def goes() -> None:
        if fault == "killed":
            own_server.kill()
        else:
            own_server.suspend()
        back.append(threading.Thread(target=comes_back))
        back[0].start()

    options = real.options(bulk_actions=100, max_retry_seconds=240)
    transport = ElasticsearchTransport(Cluster.of(options), connections=2, timeout_seconds=2)
    counts = Indexer(Interrupted(transport, 12, goes), options).index([batch])
    back[0].join()
    transport.close()
    assert counts.retries > 0
    assert (counts.created + counts.repeated, counts.dead_lettered) == (2970, 30)
    documents = real.documents()
    assert {document["n"] for document in documents.values()} == {n for n in range(3000) if n % 100}
    assert len(documents) == 2970
    assert len(real.documents(f"{real.name}-dead-letters")) == 30
    again = real.index(batch)
    assert (again.repeated, again.indexed, again.dead_lettered) == (2970, 0, 30)
    real.transport.close()
