"""Checks names of indices as Elasticsearch's MetadataCreateIndexService does, and addresses of its nodes.

A name is checked before anything is sent. Characters that would make it an expression over several indices (wildcards,
commas, date mathematics) are refused.
"""

from __future__ import annotations

from urllib.parse import urlsplit

MAX_NAME_BYTES = 255
_FORBIDDEN = '\\/*?"<>| ,#:'
_FORBIDDEN_FIRST = "-_+"
_SUFFIX = "-dead-letters"


def check_index_name(name: str) -> str:
    """Return the name if it is valid. Raises ValueError, which the definition's error repeats."""
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
    """The dead-letter index of an output for ``index`` that names none itself."""
    return f"{index}{_SUFFIX}"


def check_dead_letter_index(index: str, given: str | None) -> None:
    """Check that an output's dead letters have a separate index: ``given``, or the name derived from ``index``.

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
    """Return the address of an Elasticsearch node if it is valid: a URL, or ``host:port`` for http. Raises
    ValueError."""
    parts = urlsplit(host if "://" in host else f"http://{host}")
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(character.isspace() for character in host):
        # The text is not repeated: it may hold a credential.
        raise ValueError("has what is no http or https URL; write https://host:9200")
    return host
