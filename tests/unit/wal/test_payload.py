"""Records survive the way into bytes and back."""

from __future__ import annotations

import contextlib
import struct

import pyarrow as pa
import pytest
from tests.support.records import make_block

from headrace.wal.errors import PayloadError
from headrace.wal.frame import RECORD_SCHEMA, Codec, decode, encode


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_round_trip_keeps_nulls_empty_values_and_headers(codec: Codec) -> None:
    batch, _ = make_block(
        [None, b"", b"value", b"\x00\xff"],
        keys=[b"key", None, b"", b"\n"],
        headers=[None, [], [{"key": "a", "value": None}, {"key": "a", "value": b""}], [{"key": "b", "value": b"\x00"}]],
    )
    assert decode(encode(batch, codec)).equals(batch)


@pytest.mark.parametrize(("codec", "magic"), [("zstd", "28b52ffd"), ("lz4", "04224d18")])
def test_round_trip_of_large_values(codec: Codec, magic: str) -> None:
    batch, _ = make_block([bytes([i]) * 900_000 for i in range(8)])
    encoded = encode(batch, codec)
    assert bytes.fromhex(magic) in encoded.to_pybytes()
    assert encoded.size < batch.nbytes / 50
    assert decode(encoded).equals(batch)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_round_trip_of_no_records(codec: Codec) -> None:
    batch, _ = make_block([])
    assert decode(encode(batch, codec)).equals(batch)


def test_topic_as_dictionary_comes_back_plain_for_spark() -> None:
    batch, _ = make_block([b"a", b"b"])
    encoded = batch.set_column(2, "topic", batch.column("topic").dictionary_encode())
    got = decode(encode(encoded))
    assert got.schema.equals(RECORD_SCHEMA)
    assert got.equals(batch)


def test_a_sliced_batch_is_stored_without_its_surroundings() -> None:
    batch, _ = make_block([b"x" * 100] * 1000)
    part = batch.slice(10, 5)
    assert decode(encode(part)).equals(part)
    assert encode(part).size < encode(batch).size + 1


def test_columns_may_stand_in_another_order() -> None:
    batch, _ = make_block([b"a"])
    assert decode(encode(batch.select(list(reversed(batch.schema.names))))).equals(batch)


def test_another_schema_is_refused_naming_the_column() -> None:
    batch, _ = make_block([b"a"])
    with pytest.raises(PayloadError, match="'offset' is int64, got int32"):
        encode(batch.set_column(4, "offset", pa.array([1], pa.int32())))
    with pytest.raises(PayloadError, match="columns are"):
        encode(batch.drop_columns(["key"]))


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"garbage that is no Arrow stream", bytes(100)])
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(PayloadError):
        decode(data)


@pytest.mark.parametrize("claimed", [1 << 62, 1 << 40, 1 << 33, -5, 200_000, 0])
def test_a_payload_that_claims_another_length_is_an_error(claimed: int) -> None:
    """Made so on purpose: the frame's checksum would hold."""
    size = 100_000
    data = bytearray(encode(make_block([b"x" * size])[0]).to_pybytes())
    # Arrow writes the unpacked length in front of each compressed buffer.
    at = data.rfind(struct.pack("<q", size))
    assert data[at + 8 : at + 12] == bytes.fromhex("28b52ffd"), "no zstd frame follows"
    data[at : at + 8] = struct.pack("<q", claimed)
    with pytest.raises(PayloadError):
        decode(bytes(data))


def test_a_cut_stream_is_an_error() -> None:
    encoded = encode(make_block([b"a" * 100])[0])
    with pytest.raises(PayloadError):
        decode(encoded[: encoded.size // 2])


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("as_dictionary", [False, True])
def test_a_payload_that_decompresses_to_more_is_refused_first(codec: Codec, as_dictionary: bool) -> None:
    """It would be more than its records, and is refused before it is decompressed."""
    batch, _ = make_block([b"\x00" * (64 << 20)])
    if as_dictionary:
        batch = batch.set_column(2, "topic", batch.column("topic").dictionary_encode())
    bomb = encode(batch, codec)
    assert bomb.size < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(PayloadError, match=r"would take 67,\d{3},\d{3} bytes, and its records have 24,000"):
        decode(bomb, 24_000)
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert decode(bomb, batch.nbytes).num_rows == 1


def test_a_topic_in_a_dictionary_is_short() -> None:
    """Each record would repeat the topic."""
    batch, _ = make_block([b"a", b"b"])
    topics = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array(["t" * 10_000]))
    with pytest.raises(PayloadError, match="a topic of more than 1,000 characters"):
        decode(encode(batch.set_column(2, "topic", topics)))


def test_bytes_that_only_begin_like_a_payload_are_refused() -> None:
    batch, _ = make_block([b"value"] * 100)
    whole = bytearray(encode(batch).to_pybytes())
    for at in range(8, len(whole), 7):
        damaged = bytes([*whole[:at], 0xFF, 0xFF, 0xFF, 0x7F, *whole[at + 4 :]])
        with contextlib.suppress(PayloadError):
            decode(damaged, batch.nbytes)
