"""The reference page of the commands, from the same objects that print `headrace --help`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from headrace.cli.main import app


def commands_page() -> str:
    """Every command with its arguments and options."""
    root: Any = typer.main.get_command(app)
    lines = ["# Commands", "", inspect.cleandoc(root.help or ""), ""]
    for name, command in _commands(root, "headrace"):
        lines += [f"## `{name}`", "", _text(command.help), ""]
        lines += ["```", f"{name} {' '.join(_usage(command))}".rstrip(), "```", ""]
        rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            lines += ["| argument or option | meaning |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    context = typer.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        if hasattr(command, "list_commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _usage(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]"
    if any(parameter.param_type_name == "option" for parameter in command.params):
        yield "[OPTIONS]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = parameter.name.upper()
    else:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    text = " ".join(_text(getattr(parameter, "help", None)).split())
    return f"| `{names}` | {text.replace('|', chr(92) + '|')} |"


def _text(help_text: str | None) -> str:
    # A form feed ends what a help text shows; backspace is click's mark of a paragraph that is not wrapped.
    return inspect.cleandoc((help_text or "").partition("\f")[0].replace("\b", ""))
