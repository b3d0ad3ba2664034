"""The names of places that outputs write to: an index, a topic, a folder. Each is plain text, with nothing to fill in.

Names of indices are checked as Elasticsearch's MetadataCreateIndexService does, before anything is sent. Characters
that would make a name an expression over several indices (wildcards, commas, date mathematics) are refused.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

MAX_NAME_BYTES = 255
_FORBIDDEN = '\\/*?"<>| ,#:'
_FORBIDDEN_FIRST = "-_+"

# The forms of Kafka Connect, Logstash, Vector, Fluent Bit, Airflow and of Elasticsearch's date mathematics. A percent
# sign before two hexadecimal digits is a character of a URL.
_PLACEHOLDER = re.compile(
    r"<[^>]*>?|[$%#@~]?\{[^}]*\}*|\}|\$\(?\w+\)?|%(?![0-9A-Fa-f]{2})-?[A-Za-z]|\[[A-Za-z][^\]]*\]|yyyy", re.IGNORECASE
)


def check_no_placeholder(name: str, what: str, *, of_output: bool = True) -> str:
    """Return the name of ``what`` ("index") if no part of it looks like another tool's placeholder.

    It would be taken literally, and all records would go to one place of that very name. Raises ValueError.
    """
    if found := _PLACEHOLDER.search(str(name)):
        several = ". For several, declare an output for each, whose transform keeps its rows" if of_output else ""
        raise ValueError(
            f"has {found[0]!r}, as a placeholder or date mathematics; nothing is filled in: write the name of one "
            f"{what}{several}"
        )
    return name


def check_index_name(name: str) -> str:
    """Return the name if it is valid. Raises ValueError, which the definition's error repeats."""
    check_no_placeholder(name, "index, or an alias of one")
    forbidden = sorted(set(name) & set(_FORBIDDEN))
    if not name:
        raise ValueError("is empty; name an index")
    if name != name.lower():
        raise ValueError("is no name for an index: it has capital letters")
    if forbidden or not name.isprintable():
        shown = ", ".join("blanks" if character == " " else character for character in forbidden)
        raise ValueError(f"is no name for an index: it has {shown or 'characters that cannot be printed'}")
    if name[0] in _FORBIDDEN_FIRST:
        raise ValueError(f"is no name for an index: it begins with {name[0]}")
    if name in (".", ".."):
        raise ValueError("is no name for an index: it is a folder's")
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise ValueError(f"is no name for an index: it has {size} bytes in UTF-8, more than {MAX_NAME_BYTES}")
    return name


IndexName = Annotated[str, AfterValidator(check_index_name)]
