"""Batches whose registry was set up again, or got another connection, before they were decoded or after."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyspark.sql import SparkSession
from tests.integration.conftest import new_server_folder
from tests.integration.spark.registry_shop import FIRST, SECOND, Define, Shop, connect, order

from headrace.batch.places import READERS
from headrace.devstack.registry import RegistryServer
from headrace.ledger.states import EventKind
from headrace.registry.schemas import KeptSchemaMissingError
from headrace.spark.preview import preview_batch
from headrace.stream import AvroDecoder, Stream, Window
from headrace.stream_context import StreamContext

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_data")]

PRICE, PIECES = ({"name": name, "type": "int"} for name in ("price", "pieces"))
# Bytes of one are bytes of the other, with the numbers in turn.
THEN, NOW = order(PRICE, PIECES), order(PIECES, PRICE)
ROW = {"price": 100, "pieces": 1}
REFUSED = "gives another schema for schema 1 than it did before"


@pytest.fixture
def shop_of(connections: Define, make_batch_ledger: Any, tmp_path: Path) -> Callable[..., Shop]:
    def made(server: RegistryServer, **outputs: Any) -> Shop:
        return Shop(server, connections, make_batch_ledger, tmp_path, **outputs)

    return made


class SetUpAgain:
    """A shop whose first batch was read by a registry that was then set up again, at the same address."""

    def __init__(self, shop: Shop, spark: SparkSession, registry: RegistryServer, other: str) -> None:
        self.shop, self._spark, self._registry, self.other = shop, spark, registry, other

    def refused(self) -> int:
        """A batch of the new registry, which was refused; its time."""
        time_ms = self.shop.allocate(self.shop.topic.framed(NOW, **ROW))
        with pytest.raises(Exception, match=REFUSED):
            self.shop.run(self._spark, time_ms)
        return time_ms


@pytest.fixture
def set_up_again(
    spark: SparkSession, own_registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> Iterator[Callable[..., SetUpAgain]]:
    with new_server_folder() as folder:
        again = RegistryServer(folder, port=own_registry.port)

        def made(*, first: bool = True, **outputs: Any) -> SetUpAgain:
            shop = shop_of(own_registry, **outputs)
            value = shop.topic.framed(THEN, **ROW)
            while first and (time_ms := shop.allocate(value)):
                shop.run(spark, time_ms)
                # The next batch is one at which a window of 20 s is not due.
                if time_ms % 20_000 == 0:
                    break
            own_registry.stop()
            again.start()
            return SetUpAgain(shop, spark, again, connect(connections, again.url))

        yield made
        again.stop()


@pytest.mark.parametrize("own_schema", [False, True])
def test_a_batch_keeps_its_registry_when_another_is_named(
    spark: SparkSession,
    own_registry: RegistryServer,
    connections: Define,
    shop_of: Callable[..., Shop],
    own_schema: bool,
) -> None:
    """As the error of a registry that was set up again says. What has been decoded is read as it was."""
    shop = shop_of(own_registry)
    decoder = {"schema_text": json.dumps(SECOND)} if own_schema else {}
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    shop.run(spark, time_ms, **decoder)
    before = shop.written()
    own_registry.stop()
    with new_server_folder() as folder, RegistryServer(folder, port=own_registry.port) as again:
        second_ms = shop.allocate(shop.topic.framed(SECOND, id=2, note="x"))
        with pytest.raises(Exception, match="connection with another id"):
            shop.run(spark, second_ms, **decoder)
        decoder["registry"] = connect(connections, again.url)
        shop.run(spark, second_ms, **decoder)
        assert "no output of it has completed" in shop.log
        shop.run(spark, time_ms, force=True, **decoder)
        assert f"for those of connection {shop.connection!r}, by which the batch was decoded before" in shop.log
        assert shop.written() == [*before, {"id": 2, "note": "x"}]
        # The definition goes back.
        shop.run(spark, second_ms, force=True)
    decoder["registry"] = connect(connections, "http://127.0.0.1:1")
    for written_ms in (time_ms, second_ms):
        # Renamed only, and gone.
        counts = shop.run(spark, written_ms, force=True, **decoder).outputs["parquet"]
    assert shop.written() == [*before, {"id": 2, "note": "x"}]
    assert [fact["registry"] for fact in counts[READERS].values()] != [shop.connection]


def test_an_output_that_was_not_due_vouches_for_no_id(
    spark: SparkSession, set_up_again: Callable[..., SetUpAgain]
) -> None:
    """It has completed, but decoded nothing."""
    made = set_up_again(plain={}, windowed={"window": Window(length="10 s", slide="20 s")})
    shop = made.shop
    time_ms = shop.allocate(shop.topic.framed(NOW, **ROW))
    assert "skipped" in shop.run(spark, time_ms, outputs=["windowed"]).outputs["windowed"]
    before = shop.written("plain")
    with pytest.raises(Exception, match=REFUSED):
        shop.run(spark, time_ms, outputs=["plain"])
    shop.run(spark, time_ms, outputs=["plain"], registry=made.other)
    assert shop.written("plain") == [*before, ROW]


def test_a_window_reads_each_batch_by_its_registry(
    spark: SparkSession, set_up_again: Callable[..., SetUpAgain]
) -> None:
    made = set_up_again(windowed={"window": Window(length="20 s")})
    time_ms = made.refused()
    result = made.shop.run(spark, time_ms, registry=made.other)
    last = [row for row in made.shop.written("windowed")][-2:]
    assert last == [ROW, ROW]
    assert result.outputs["windowed"]["undecodable"] == 0


def test_a_window_vouches_for_the_batches_that_it_has_read(
    spark: SparkSession, own_registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> None:
    """Those at which it was not due have decoded nothing themselves."""
    shop = shop_of(own_registry, windowed={"window": Window(length="40 s", slide="20 s")})
    value, times = shop.topic.framed(THEN, **ROW), []
    while len(times) < 2 or times[-1] % 20_000:
        times.append(shop.allocate(value))
        shop.run(spark, times[-1])
    own_registry.stop()
    with new_server_folder() as folder, RegistryServer(folder, port=own_registry.port) as again:
        other = connect(connections, again.url)
        for _ in range(2):
            last_ms = shop.allocate(shop.topic.framed(NOW, **ROW))
            shop.run(spark, last_ms, registry=other)
    assert last_ms == times[-1] + 20_000
    assert shop.written("windowed") == [ROW] * len(shop.written("windowed"))


def test_what_a_window_reads_first_is_asked_for(spark: SparkSession, set_up_again: Callable[..., SetUpAgain]) -> None:
    """Its own batch was decoded by another output, which has not read the earlier batch."""
    made = set_up_again(windowed={"window": Window(length="20 s", slide="20 s")})
    shop = made.shop
    shop.run(spark, shop.allocate(shop.topic.framed(NOW, **ROW)))
    shop.add_output(plain={})
    time_ms = shop.allocate()
    for _ in range(2):
        with pytest.raises(Exception, match=REFUSED):
            shop.run(spark, time_ms)
    with pytest.raises(Exception, match=REFUSED):
        preview_batch(StreamContext(shop.definition(), shop.batch.ledger), time_ms, lambda: spark, output_id="windowed")
    shop.run(spark, time_ms, registry=made.other)
    assert shop.written("windowed")[-1] == ROW


def test_a_new_decoder_asks_for_its_own_ids_only(
    spark: SparkSession, own_registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> None:
    shop = shop_of(own_registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    shop.run(spark, time_ms)
    own_registry.stop()
    given = shop.definition()
    keys = AvroDecoder(registry=connect(connections, "http://127.0.0.1:1"), schema_text=json.dumps(FIRST))
    source = given.inputs[0].model_copy(update={"key_decoder": keys})
    changed = Stream(**{**dict(given), "inputs": source})
    result = shop.attempt(spark, shop.batch.begin(time_ms, force=True), stream=changed)
    assert result.outputs["parquet"]["undecodable"] == 1, "its key has no frame"


def test_two_decoders_of_a_subject_have_records_of_their_own(
    registry: RegistryServer, own_registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> None:
    """They read topics of one name from two clusters, and so two registries."""
    shop = shop_of(registry)
    topic = shop.topic
    topic.register(FIRST)
    there = SchemaRegistryClient({"url": own_registry.url})
    there.register_schema(f"{topic.name}-value", Schema(json.dumps(SECOND), "AVRO"))
    given = shop.definition()
    by_other = AvroDecoder(registry=connect(connections, own_registry.url))
    second = given.inputs[0].model_copy(update={"id": "second", "value_decoder": by_other})
    stream = Stream.model_construct(**{**dict(given), "inputs": (given.inputs[0], second)})
    for _ in range(3):
        time_ms = shop.allocate()
        claim = shop.batch.begin(time_ms)
        shop.readers_of(stream, time_ms, claim=claim)
        shop.batch.ledger.attempts.fail(claim, "so that the next one has the slot")
    folder = Path(stream.folder_url)
    assert len([file for file in folder.rglob("reader-*") if file.is_file()]) == 2
    assert not shop.batch.ledger.events.latest(stream.name, [EventKind.SCHEMA_CHANGED])


@pytest.mark.parametrize("begun", [True, False])
def test_a_replay_of_a_refused_batch_is_refused(
    spark: SparkSession, set_up_again: Callable[..., SetUpAgain], begun: bool
) -> None:
    made = set_up_again()
    shop = made.shop
    time_ms = made.refused() if begun else shop.allocate(shop.topic.framed(NOW, **ROW))
    with pytest.raises(Exception, match=REFUSED):
        shop.replay(spark, time_ms, "v2")
    shop.replay(spark, time_ms, "v3", registry=made.other)
    assert shop.written("parquet-v3") == [ROW]
    # What the replay has decoded is known.
    shop.replay(spark, time_ms, "v3")
    assert shop.written("parquet-v3") == [ROW]


def test_a_look_at_a_refused_batch_is_refused(spark: SparkSession, set_up_again: Callable[..., SetUpAgain]) -> None:
    made = set_up_again()
    time_ms = made.refused()
    context = StreamContext(made.shop.batch.stream, made.shop.batch.ledger)
    with pytest.raises(Exception, match=REFUSED):
        preview_batch(context, time_ms, lambda: spark)


def test_an_output_run_again_keeps_the_registry(
    registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> None:
    """One of two outputs has completed: the other one, and the first by force, read as it did."""
    shop = shop_of(registry, one={}, two={})
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    ledger, other = shop.batch.ledger, connect(connections, registry.url)
    one = shop.batch.begin(time_ms, outputs=["one"])
    facts = dict(shop.readers(time_ms, claim=one).facts)
    two = shop.batch.begin(time_ms, outputs=["two"])
    shop.readers(time_ms, claim=two, registry=other)
    ledger.attempts.fail(two, "the disk is full")
    ledger.attempts.record_output(one, "one", {"undecodable": 0, READERS: facts})
    ledger.attempts.complete(one)
    for output in ("one", "two"):
        attempt = shop.batch.begin(time_ms, outputs=[output], force=True)
        readers = shop.readers(time_ms, claim=attempt, registry=other)
        assert [fact["registry"] for fact in readers.facts.values()] == [shop.connection]
        assert not readers.first
        ledger.attempts.fail(attempt, "the disk is full")
    assert not shop.readers(time_ms, registry=other).first


def test_a_decoded_batch_keeps_its_subject(
    registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> None:
    """The new subject may be unknown to the registry of before, and the connection gone."""
    shop = shop_of(registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    shop.complete(time_ms)
    shop.topic.register(SECOND)
    for decoder in ({"subject": "unknown"}, {"registry": connect(connections, "http://127.0.0.1:1"), "subject": "x"}):
        again = shop.batch.begin(time_ms, force=True)
        readers = shop.readers(time_ms, claim=again, **decoder)
        (fact,) = readers.facts.values()
        assert (fact["registry"], fact["version"]) == (shop.connection, 1)
        assert readers.stream.inputs[0].value_decoder.column == "`id` INT"


def test_changed_columns_are_told_of_another_connection(
    registry: RegistryServer, connections: Define, shop_of: Callable[..., Shop]
) -> None:
    shop = shop_of(registry)
    shop.complete(shop.allocate(shop.topic.framed(FIRST, id=1)))
    shop.topic.register(SECOND)
    (schema,) = [file for file in Path(shop.batch.stream.folder_url).rglob("schema-*") if file.is_file()]
    schema.unlink()
    time_ms = shop.allocate(shop.topic.framed(SECOND, id=2, note="x"))
    told: list[str] = []
    shop.readers(time_ms, claim=shop.batch.begin(time_ms), told=told, registry=connect(connections, registry.url))
    (event,) = shop.batch.ledger.events.latest(shop.batch.stream.name, [EventKind.SCHEMA_CHANGED])
    assert event.payload["differences"] == ["note is new (STRING)", "id was INT and is BIGINT"]
    assert re.search("the columns of .* have changed", told[-1])


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"subject": "x"}'])
def test_a_damaged_record_of_a_reader_is_none(
    registry: RegistryServer, shop_of: Callable[..., Shop], damage: bytes
) -> None:
    shop = shop_of(registry)
    shop.complete(shop.allocate(shop.topic.framed(FIRST, id=1)))
    (file,) = [file for file in Path(shop.batch.stream.folder_url).rglob("reader-*") if file.is_file()]
    file.write_bytes(damage)
    for _ in range(2):
        shop.complete(shop.allocate(shop.topic.framed(FIRST, id=2)))
    assert len([file for file in file.parent.glob("reader-*") if file.is_file()]) == 2


@pytest.mark.parametrize("damage", [b"", b"00", b"\xff" * 64])
def test_a_damaged_id_is_named(spark: SparkSession, own_registry: RegistryServer, shop_of: Any, damage: bytes) -> None:
    shop = shop_of(own_registry)
    time_ms = shop.allocate(shop.topic.framed(FIRST, id=1))
    shop.run(spark, time_ms)
    (file,) = [file for file in Path(shop.batch.stream.folder_url).rglob("id-*") if file.is_file()]
    file.write_bytes(damage)
    with pytest.raises(Exception, match=rf"{KeptSchemaMissingError.__name__}|The value {file.name} in .* is damaged"):
        shop.run(spark, time_ms, force=True)
    file.unlink()
    shop.run(spark, time_ms, force=True)
    assert shop.written() == [{"id": 1}]
