"""The names of places that outputs write to: an index, a topic, a folder.

Names of indices are checked as Elasticsearch does, before anything is sent (``headrace.formats.index_names``). But for
an output's ``index``, each is plain text, with nothing to fill in.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from headrace.formats.index_names import foreign_placeholder, illegal_name, parse_index


def check_no_placeholder(name: str, what: str, *, of_output: bool = True) -> str:
    """Return the name of ``what`` ("index") if no part of it looks like another tool's placeholder.

    It would be taken literally, and all records would go to one place of that very name. Raises ValueError.
    """
    if found := foreign_placeholder(str(name)):
        several = ". For several, declare an output for each, whose transform keeps its rows" if of_output else ""
        raise ValueError(
            f"has {found!r}, as a placeholder or date mathematics; nothing is filled in: write the name of one "
            f"{what}{several}"
        )
    return name


def check_index_name(name: str) -> str:
    """Return the name of one index if it is valid. Raises ValueError, which the definition's error repeats."""
    check_no_placeholder(name, "index, or an alias of one", of_output=False)
    if not name:
        raise ValueError("is empty; name an index")
    if problem := illegal_name(name):
        raise ValueError(f"is no name for an index: {problem}")
    return name


def _check_index(index: str | dict[str, str]) -> str | dict[str, str]:
    parse_index(index)
    return index


IndexName = Annotated[str, AfterValidator(check_index_name)]
RecordIndex = Annotated[str | dict[str, str], AfterValidator(_check_index)]
"""The index of each record: a name, a name with placeholders, or such a name for each topic."""
