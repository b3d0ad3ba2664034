"""docs/extending.md gives the signature of every helper that it names, as the code has it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, ForwardRef

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
_MARKER = "<!-- compared with the code by tests/unit/docs/test_extending.py -->\n```text\n"
# Classes that are extended, and what is described there in words.
_NO_HELPERS = {"Receiver", "InputDefinition", "OutputDefinition", "DecoderDefinition"}


def sections() -> dict[str, str]:
    """The text of each module's signatures, by the module's name."""
    block = PAGE.partition(_MARKER)[2].partition("```")[0]
    parts = re.split(r"(?m)^# (headrace\.[\w.]+)\n", block)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def squeezed(text: str) -> str:
    return re.sub(r"[\s'\"]+", "", text)


def named(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def signature(helper: Any) -> str:
    text = str(inspect.signature(helper)).replace("<factory>", "{}")
    return re.sub(rf"{ForwardRef.__name__}\('([^']*)'\)", r"\1", text)


def test_the_signatures_of_helpers_are_those_of_the_code() -> None:
    helpers = {
        (module, each[1]): each[2]
        for module, text in sections().items()
        for each in re.finditer(r"(?ms)^(?:def|class) ([\w.]+)(.*?)(?=^(?:def|class) |\Z)", text)
    }
    assert len(helpers) >= 15
    for (module, name), given in helpers.items():
        assert squeezed(given).removesuffix("->None") == squeezed(signature(named(module, name))).removesuffix("->None")


def test_every_helper_that_the_page_names_has_its_signature() -> None:
    given = sections()
    for module, name in re.findall(r"`(headrace(?:\.[a-z_]+)+)\.(\w+)`", PAGE):
        helper = getattr(importlib.import_module(module), name, None)
        if callable(helper) and name not in _NO_HELPERS:
            assert re.search(rf"(?m)^(?:def|class) {name}\(", given.get(module, "")), f"{module}.{name}"
