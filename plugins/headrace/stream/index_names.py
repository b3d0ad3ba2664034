"""The names that Elasticsearch takes for an index, as its MetadataCreateIndexService checks them.

What it checks of an index that a bulk request makes is checked before anything is sent, and what would make the name an
expression over several indices (wildcards, commas, date mathematics) is among it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

MAX_NAME_BYTES = 255
_FORBIDDEN = '\\/*?"<>| ,#:'
_FORBIDDEN_FIRST = "-_+"
_SUFFIX = "-dead-letters"


def check_index_name(name: str) -> str:
    """The name, if it is one. Raises ValueError, which a definition's error repeats."""
    found = sorted(set(name) & set(_FORBIDDEN))
    if not name:
        raise ValueError("is empty; name an index")
    if name != name.lower():
        raise ValueError("is no name for an index: it has capital letters")
    if found or not name.isprintable():
        shown = ", ".join("blanks" if character == " " else character for character in found)
        raise ValueError(f"is no name for an index: it has {shown or 'characters that cannot be printed'}")
    if name[0] in _FORBIDDEN_FIRST:
        raise ValueError(f"is no name for an index: it begins with {name[0]}")
    if name in (".", ".."):
        raise ValueError("is no name for an index: it is a folder's")
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise ValueError(f"is no name for an index: it has {size} bytes in UTF-8, more than {MAX_NAME_BYTES}")
    return name


def dead_letters_of(index: str) -> str:
    """The dead-letter index of an output that names none."""
    return f"{index}{_SUFFIX}"


def check_dead_letter_index(index: str, given: str | None) -> None:
    """See that an output's dead letters have an index of their own: ``given``, or what follows from ``index``.

    Raises ValueError.
    """
    if given == index:
        raise ValueError(f"dead_letter_index is the index itself, {index!r}; name another, or leave it out")
    derived = len(dead_letters_of(index).encode())
    if not given and derived > MAX_NAME_BYTES:
        raise ValueError(
            f"dead_letter_index would be <index>{_SUFFIX}, {derived} bytes and more than {MAX_NAME_BYTES}; name another"
        )


def check_host(host: str) -> str:
    """The address of an Elasticsearch node, if it is one: a URL, or ``host:port`` for http. Raises ValueError."""
    parts = urlsplit(host if "://" in host else f"http://{host}")
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(character.isspace() for character in host):
        # The text is not repeated: it may hold a credential.
        raise ValueError("has what is no http or https URL; write https://host:9200")
    return host
