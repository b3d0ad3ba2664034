"""Every `headrace …` command that a page, an error text, a script or a comment names exists and parses."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli.main import COMMANDS, app
from headrace.cli.options import examples_of

ROOT = Path(__file__).resolve().parents[3]
FILES = ("*.md", "*.py", "*.sh", "*.yaml", "*.toml", "Makefile")

# In a page's code block, or between back-quotes, which may be a line break apart; "# " continues a comment.
_QUOTED = re.compile(r"`+(?:[\w./]*bin/)?(?:airflow\s+)?headrace\s+([a-z][^`]+?)`")
_LINE = re.compile(r"(?:^\s*(?:[\w./]*bin/)?|\bairflow +)headrace +([a-z][^|;&\n]*)", re.MULTILINE)
_WITHIN = re.compile(rf"[\s(/]headrace +((?:{'|'.join(COMMANDS)})\b[^|;&)\n]*)")
_BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_OF_AIRFLOW = re.compile(r"^ *(airflow (?!headrace\b)[a-z].*)$", re.MULTILINE)
_LEFT_OUT_OF_AIRFLOW = re.compile(r"airflow\s+headrace\s+stack\b")


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LEDGER", "sqlite:////nowhere/ledger.db")


def named_commands(path: Path) -> Iterator[str]:
    """The commands that a file names, without the word headrace."""
    text = path.read_text()
    if path.suffix == ".py":
        # A text that is continued on the next line: its quotes go.
        text = re.sub(r'"\s*\n\s*f?"', "", text)
    if path.suffix in (".sh", "") or path.name == "Makefile":
        yield from re.findall(r"^\s*(?:\S*bin/|\$\(BIN\)/)?headrace ([^|;&\\\n]+)", text, re.MULTILINE)
        return
    for command in _QUOTED.findall(text):
        yield re.sub(r"\s*\n\s*(?:#\s)?\s*", " ", command)
    if path.suffix == ".md":
        for block in blocks_of(text):
            yield from _LINE.findall(block)
            yield from _WITHIN.findall(block)


def blocks_of(page: str) -> Iterator[str]:
    """The code blocks of a page. A line that ends with a backslash and the next one are one line."""
    for block in _BLOCK.findall(page):
        yield re.sub(r"\\\n\s*", "", block)


def parse(command: str) -> None:
    """Parse the command as the program does, but run nothing.

    Placeholders are values: words in capitals, ``{…}``, ``%s`` and ``…``. Parts in brackets are given.
    A command may be named without its required arguments (`headrace streams stop`).
    """
    text = re.sub(r"\{[^}]*\}|%s|…", "x", command.partition(" #")[0]).replace("[", " ").replace("]", " ")
    words = shlex.split(text)
    found: Any = typer.main.get_command(app)
    context = found.make_context("headrace", [], resilient_parsing=True)
    while hasattr(found, "commands"):
        assert words, "it names a group, and no command of it"
        name = words.pop(0)
        assert name in found.commands, f"there is no command {name!r}"
        found = found.commands[name]
        if hasattr(found, "commands"):
            context = found.make_context(name, [], parent=context, resilient_parsing=True)
    try:
        found.make_context(name, words, parent=context)
    except typer.Exit:
        pass  # --help
    except Exception as error:
        if type(error).__name__ != "MissingParameter":
            raise


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *FILES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def test_every_command_that_is_named_parses() -> None:
    wrong, found = [], set()
    for path in files():
        for command in named_commands(path):
            try:
                parse(command)
            except Exception as error:
                wrong.append(f"{path.relative_to(ROOT)}: headrace {command}: {error}")
            found.add(command)
    assert not wrong, "\n".join(wrong)
    assert len(found) > 40


def pages() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def test_every_command_of_airflow_on_a_page_parses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the parser of the Airflow that is installed."""
    pytest.importorskip("airflow")
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    from airflow.cli.cli_parser import get_parser

    lines = {}
    for page in pages():
        for block in blocks_of(page.read_text()):
            lines |= dict.fromkeys(_OF_AIRFLOW.findall(block), page.name)
    assert len(lines) > 5
    wrong = []
    for line, page in lines.items():
        given = re.sub(r"\$\([^)]*\)", "2026-11-21T00:00:00Z", line)
        try:
            get_parser().parse_args(shlex.split(given, comments=True)[1:])
        except SystemExit:
            wrong.append(f"{page}: {line}: {capsys.readouterr().err.splitlines()[-1:]}")
    assert wrong == []


def test_no_page_runs_an_airflow_command_that_does_not_exist() -> None:
    assert [page.name for page in pages() if _LEFT_OUT_OF_AIRFLOW.search(page.read_text())] == []


@pytest.mark.parametrize(
    "command",
    [
        "stop",
        "streams stop --nonsense",
        "streams",
        "streams stop NAME --wait soon",
        "batches nonsense",
        "fsck NAME",
        "streams show NAME MORE",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises(
        Exception, match=r"o such option|no command|names a group|unexpected extra|a valid (number|float)"
    ):
        parse(command)


def targets() -> list[tuple[str, str]]:
    """Each command with its ``module:function``."""
    every = []
    for name, noun in COMMANDS.items():
        verbs = {"": noun.verbs} if isinstance(noun.verbs, str) else noun.verbs
        every += [(f"{name} {verb}".strip(), target) for verb, target in verbs.items()]
    return every


@pytest.mark.parametrize(("command", "target"), targets())
def test_each_command_has_examples_that_parse(command: str, target: str) -> None:
    module, _, function = target.partition(":")
    lines = examples_of(getattr(importlib.import_module(module), function))
    assert lines
    for line in lines:
        assert line.startswith(command)
        parse(line)


@pytest.mark.parametrize(("command", "target"), targets())
def test_each_command_prints_json_if_asked(command: str, target: str) -> None:
    parse(f"{command} --json")


def test_each_command_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [command for command, _ in targets() if f"`{command}" not in page] == []
