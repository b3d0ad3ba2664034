"""Random pairs of Avro schemas, a writer's and a reader's that was made from it, with what fastavro resolves."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import fastavro
import numpy as np

from headrace.formats.avro_schema import AvroKind, AvroType, read_schema

_PROMOTED = [
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
]
_EXACT = [("int", "long"), ("int", "double"), ("float", "double")]
_SIMPLE = ["boolean", "int", "long", "float", "double", "bytes", "string"]
_DEFAULTS: dict[str, Any] = {"boolean": True, "int": -3, "long": 2**40, "float": 1.5, "double": 2, "string": "new"}


class Pairs:
    """Each writer's schema can be read by its reader's, but for some of its values."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = 0
        self._alike = self._chance(0.6)
        """Whether the two differ only in what `headrace.spark.records.avro.resolution` takes."""

    def record(self, depth: int = 3) -> tuple[Any, Any]:
        name, fields = self._name("R"), range(self._random.randrange(1, 5))
        written, read = [], []
        for number in fields:
            writer, reader = self.pair(depth - 1)
            written.append({"name": f"f{number}", "type": writer})
            read.append({"name": f"f{number}", "type": reader})
            if not self._alike and self._chance(0.15):
                read[-1] |= {"name": f"new{number}", "aliases": ["other", f"f{number}"]}
        for number in range(self._random.choice([0, 0, 1, 2])):
            written.append({"name": f"gone{number}", "type": self._random.choice([*_SIMPLE, "null", ["null", "int"]])})
            kind = self._random.choice([*_DEFAULTS, "null"])
            new = {"type": ["null", "string"], "default": None}
            if kind != "null":
                nullable = [kind, "null"] if not self._alike and self._chance(0.3) else kind
                new = {"type": nullable, "default": _DEFAULTS[kind]}
            read.append({"name": f"added{number}", **new})
        self._random.shuffle(read)
        more = {"aliases": [name]} if not self._alike and self._chance(0.15) else {}
        record = {"type": "record", "name": name, "fields": written}
        return record, {"type": "record", "name": f"{name}Renamed" if more else name, "fields": read, **more}

    def pair(self, depth: int, *, in_union: bool = False) -> tuple[Any, Any]:
        choose = self._random.random()
        if depth == 0 or choose < 0.25:
            kind = self._random.choice(_SIMPLE)
            return self._random.choice([(kind, kind), *(_EXACT if self._alike else _PROMOTED)])
        if choose < 0.4:
            return self._named()
        if choose < 0.55:
            writer, reader = self.pair(depth - 1)
            kind, key = self._random.choice([("array", "items"), ("map", "values")])
            return {"type": kind, key: writer}, {"type": kind, key: reader}
        if choose < 0.7 or in_union:
            return self.record(depth)
        return self._nullable(depth) if choose < 0.85 else self._union(depth)

    def _named(self) -> tuple[Any, Any]:
        name = self._name("N")
        if self._chance(0.4):
            fixed = {"type": "fixed", "name": name, "size": self._random.choice([1, 5])}
            return fixed, fixed
        symbols = ["A", "B", "C", "D"]
        if self._alike:
            enum = {"type": "enum", "name": name, "symbols": symbols}
            return enum, enum
        written, read = (self._random.sample(symbols, self._random.randrange(2, 5)) for _ in range(2))
        more = {"default": self._random.choice(read)} if self._chance(0.5) else {}
        enum = {"type": "enum", "name": name}
        return {**enum, "symbols": written}, {**enum, "symbols": read, **more}

    def _nullable(self, depth: int) -> tuple[Any, Any]:
        writer, reader = self.pair(depth - 1, in_union=True)
        with_null = self._random.choice([(False, True), (True, True), (True, self._alike)])
        made = [
            self._random.sample([kind, "null"], 2) if has else kind
            for kind, has in zip((writer, reader), with_null, strict=True)
        ]
        return made[0], made[1]

    def _union(self, depth: int) -> tuple[Any, Any]:
        """One member of what Python has one type for, since fastavro does not say which member a value is."""
        members: dict[str, tuple[Any, Any]] = {}
        for _ in range(self._random.randrange(2, 5)):
            writer, reader = self.pair(depth - 1, in_union=True)
            members.setdefault(_group(reader), (writer, reader))
            if _group(writer) != _group(reader):
                members.setdefault(_group(writer), members[_group(reader)])
        if self._alike:
            same = [writer for writer, _ in members.values()]
            if len({_group(writer) for writer in same}) == len(same):
                return same, same
        pairs = list({json.dumps(pair): pair for pair in members.values()}.values())
        written = [writer for writer, _ in pairs]
        read = [reader for _, reader in pairs]
        if len({_group(each) for each in written}) < len(written) or len({_group(each) for each in read}) < len(read):
            written, read = written[:1], read[:1]
        if self._chance(0.3):
            written.insert(self._random.randrange(len(written) + 1), "null")
        if self._chance(0.4) or "null" in written:
            read.insert(self._random.randrange(len(read) + 1), "null")
        elif len(read) > 1 and self._chance(0.3):
            del read[-1]
        self._random.shuffle(read)
        return written, read

    def _name(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names}"

    def _chance(self, share: float) -> bool:
        return self._random.random() < share


def _group(kind: Any) -> str:
    name = kind if isinstance(kind, str) else str(kind["type"])
    if name in ("int", "long", "float", "double"):
        return "number"
    if name in ("string", "bytes"):
        return "text"
    return str(kind["name"]) if name in ("enum", "fixed", "record") else name


def resolved(writer: Any, reader: Any, values: Sequence[bytes]) -> list[Any]:
    """What fastavro makes of each value, as columns have it; None if it does not."""
    made = read_schema(json.dumps(reader))
    parsed = fastavro.parse_schema(writer), fastavro.parse_schema(reader)
    found = []
    for value in values:
        try:
            read = fastavro.schemaless_reader(io.BytesIO(value), *parsed, return_named_type=True)
        except fastavro.read.SchemaResolutionError:
            found.append(None)
        else:
            found.append(_of_columns(read, made))
    return found


def _of_columns(value: Any, made: AvroType) -> Any:
    if value is None:
        return None
    if made.kind is AvroKind.UNION:
        chosen = next(name for name, part in made.parts if _is_of(value, part))
        return {name: _of_columns(value, part) if name == chosen else None for name, part in made.parts}
    value = value[1] if isinstance(value, tuple) else value
    below = dict(made.parts)
    of_kind: dict[AvroKind, Callable[[Any], Any]] = {
        AvroKind.RECORD: lambda held: {name: _of_columns(held[name], part) for name, part in made.parts},
        AvroKind.ARRAY: lambda held: [_of_columns(each, below[""]) for each in held],
        AvroKind.MAP: lambda held: [(key, _of_columns(each, below[""])) for key, each in held.items()],
        AvroKind.FLOAT: lambda held: float(np.float32(held)),
        AvroKind.DOUBLE: float,
    }
    return of_kind.get(made.kind, lambda held: held)(value)


def _is_of(value: Any, part: AvroType) -> bool:
    if isinstance(value, tuple) or part.name:
        return isinstance(value, tuple) and value[0] == part.name
    kinds = {
        bool: {AvroKind.BOOLEAN},
        int: {AvroKind.INT, AvroKind.LONG, AvroKind.FLOAT, AvroKind.DOUBLE},
        float: {AvroKind.FLOAT, AvroKind.DOUBLE},
        str: {AvroKind.STRING},
        bytes: {AvroKind.BYTES},
        list: {AvroKind.ARRAY},
        dict: {AvroKind.MAP},
    }
    return part.kind in kinds[type(value)]
