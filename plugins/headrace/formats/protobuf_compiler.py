"""Compiles Protobuf's language by protoc of grpcio-tools, in a process of its own with limits.

A schema comes from a registry or from a user: it imports no file but those that are given with it, and Google's and
Confluent's own. protoc takes 30 ms.

A file's text may also be what protoc made of it, a FileDescriptorProto in base64: some of Confluent's serializers
register it so, and a registry such as Apicurio gives it back as it is. protoc checks it like a text.
"""

from __future__ import annotations

import base64
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.formats.missing_library import LibraryMissingError
from headrace.formats.protobuf_schema import ProtobufSchemaError, file_descriptor
from headrace.formats.schema_text import MAX_SCHEMA_BYTES, SchemaText

TIMEOUT_SECONDS = 20
_MEMORY_BYTES = 1024**3
_SHOWN_CHARACTERS = 500

# Of a file's name: protoc refuses "..", and a reference's name becomes a file of the temporary folder.
_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]+(/(?!\.)[A-Za-z0-9_.-]+)*")
_GOOGLE_TYPE = re.compile(r"[\"']google/type/([a-z_]+)\.proto[\"']")

# No text of Protobuf's language has a statement without a semicolon or a brace.
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_DESCRIBED = "described"

_NO_ERROR = re.compile(r"^(WARNING|[IW]\d{4} )|: warning: ")

# Python without its site-packages: it starts in 10 ms. protoc is in a module of its own there.
_PROTOC = """
import resource, sys
for limit, most in ((resource.RLIMIT_AS, {memory}), (resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_CORE, 0)):
    try:
        resource.setrlimit(limit, (most, most))
    except (OSError, ValueError):
        pass
sys.path.append(sys.argv[1])
from grpc_tools import _protoc_compiler
sys.exit(_protoc_compiler.run_main([each.encode() for each in ["protoc", *sys.argv[2:]]]))
"""

_DECIMAL = """syntax = "proto3";
package confluent.type;
message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }
"""
# A registry of Confluent knows these files, so that schemas import them without a reference.
_CONFLUENT = {
    "confluent/type/decimal.proto": _DECIMAL,
    "confluent/types/decimal.proto": _DECIMAL,
    "confluent/type/variant.proto": """syntax = "proto3";
package confluent.type;
message Variant { bytes metadata = 1; bytes value = 2; }
""",
    "confluent/meta.proto": """syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; repeated Rule rules = 4; }
message Rule { string name = 1; string doc = 2; string expr = 3; string sql = 4; }
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
""",
}


@lru_cache(maxsize=64)
def compile_schema(schema: SchemaText) -> str:
    """The schema as a FileDescriptorSet in base64, with all that it imports; the schema's own file is the last.

    Raises:
        ProtobufSchemaError: protoc refuses it, or it needs too much of time or memory.
        LibraryMissingError: grpcio-tools is not installed.
    """
    size = sum(len(text.encode()) for text in (schema.text, *(text for _, text in schema.references)))
    if size > MAX_SCHEMA_BYTES:
        raise ProtobufSchemaError(f"has {size:,} bytes, more than {MAX_SCHEMA_BYTES:,}")
    given = dict(schema.references)
    if bad := next((name for name in given if not _NAME.fullmatch(name)), None):
        raise ProtobufSchemaError(f"imports {bad[:_SHOWN_CHARACTERS]!r}, which is no name of a file")
    own = "schema.proto"
    while own in given:
        own = f"own/{own}"
    files = {**given, own: schema.text}
    described = {name: file_descriptor(text, name) for name, text in files.items() if _BASE64.fullmatch(text.strip())}
    texts = {name: text for name, text in files.items() if name not in described}
    with tempfile.TemporaryDirectory(prefix="headrace-protoc-") as made:
        folder = Path(made)
        for name, text in {**_known(texts, described), **texts}.items():
            path = folder / "files" / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ProtobufSchemaError(f"imports {name!r}, which cannot be a file: {error.strerror}") from None
        if described:
            from google.protobuf import descriptor_pb2

            given_set = descriptor_pb2.FileDescriptorSet(file=described.values())
            (folder / _DESCRIBED).write_bytes(given_set.SerializeToString())
        return base64.b64encode(
            _compiled(folder, own, [f"--descriptor_set_in={_DESCRIBED}"] * bool(described))
        ).decode()


def _known(texts: Mapping[str, str], described: Mapping[str, Any]) -> dict[str, str]:
    """The files of Confluent, and those of google.type that are named. One that is given as a descriptor is not among
    them: protoc would take the text."""
    known = {name: text for name, text in _CONFLUENT.items() if name not in described}
    imported = [f'"{name}"' for file in described.values() for name in file.dependency]
    names = {name for text in (*texts.values(), *imported) for name in _GOOGLE_TYPE.findall(text)}
    found = importlib.util.find_spec("google.type") if names else None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for name in names:
            path, imported_as = Path(folder, f"{name}.proto"), f"google/type/{name}.proto"
            if imported_as not in described and path.is_file():
                known[imported_as] = path.read_text(encoding="utf-8")
    return known


def _compiled(folder: Path, own: str, options: list[str]) -> bytes:
    spec = importlib.util.find_spec("grpc_tools")
    if spec is None or spec.origin is None:
        raise LibraryMissingError.of("compile a Protobuf schema", ImportError("grpcio-tools is not installed"))
    package = Path(spec.origin).parent
    made = folder / "made"
    child = _PROTOC.format(memory=_MEMORY_BYTES, seconds=TIMEOUT_SECONDS)
    protoc = ["-Ifiles", f"-I{package / '_proto'}", *options, "--include_imports", f"--descriptor_set_out={made}", own]
    command = [sys.executable, "-I", "-S", "-c", child, str(package.parent), *protoc]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ProtobufSchemaError(f"is not compiled in {TIMEOUT_SECONDS} seconds") from None
    if done.returncode != 0:
        said = _said(done.stderr.decode(errors="replace")) or f"protoc ended with {done.returncode}"
        raise ProtobufSchemaError(f"does not compile: {said}")
    if made.stat().st_size > MAX_SCHEMA_BYTES:
        raise ProtobufSchemaError(f"has {made.stat().st_size:,} bytes compiled, more than {MAX_SCHEMA_BYTES:,}")
    return made.read_bytes()


def _said(errors: str) -> str:
    """protoc's errors, each with its file, line and column, without its warnings and its log."""
    lines = [line.removeprefix("files/") for line in errors.splitlines() if not _NO_ERROR.search(line)]
    return "; ".join(line.strip() for line in lines if line.strip())[:_SHOWN_CHARACTERS]
