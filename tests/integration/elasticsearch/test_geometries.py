"""The texts of geometries, read by the servers' own parser. The servers of these tests have no fields of the type
geo_shape: they lack the module."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from headrace.devstack.jars import bundle_jars, find_java
from headrace.spark.records.events.connect_values import well_known_text

PARSER = """
import {package}.geometry.utils.*;

public class Parse {{
    public static void main(String[] texts) throws Exception {{
        for (String text : texts) System.out.println({call});
    }}
}}
"""
PACKAGES = {
    "elasticsearch": ("org.elasticsearch", "WellKnownText.fromWKT(StandardValidator.instance(true), true, text)"),
    "opensearch": ("org.opensearch", "new WellKnownText(true, new StandardValidator(true)).fromWKT(text)"),
}


def geometries() -> list[bytes]:
    """One of each kind, with and without a height and a measure, in ISO's well-known binary."""
    made = []
    for code, numbers in ((0, 2), (1_000, 3), (2_000, 3), (3_000, 4)):

        def points(*places: tuple[int, int], numbers: int = numbers) -> bytes:
            return b"".join(struct.pack(f"<{numbers}d", *place, *(9,) * (numbers - 2)) for place in places)

        def shape(kind: int, *parts: bytes, number: int | None = None, code: int = code) -> bytes:
            count = b"" if number == 0 else struct.pack("<I", number or len(parts))
            return struct.pack("<BI", 1, code + kind) + count + b"".join(parts)

        point = shape(1, points((1, 2)), number=0)
        line = shape(2, points((1, 2), (3, 4)), number=2)
        ring = struct.pack("<I", 4) + points((0, 0), (5, 0), (5, 5), (0, 0))
        polygon = shape(3, ring)
        made += [point, line, polygon, shape(4, point, point), shape(5, line, line), shape(6, polygon, polygon)]
        made += [shape(7, point, line, polygon, shape(4, point)), shape(4), shape(7)]
    return made


@pytest.mark.parametrize("server", PACKAGES)
def test_a_server_reads_the_text_of_each_geometry(server: str, tmp_path: Path) -> None:
    texts = [well_known_text(wkb) for wkb in geometries()]
    package, call = PACKAGES[server]
    source = tmp_path / "Parse.java"
    source.write_text(PARSER.format(package=package, call=call))
    jars = ":".join(str(jar) for jar in bundle_jars(server))
    done = subprocess.run(
        [str(find_java().executable), "-cp", jars, str(source), *texts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(texts)
