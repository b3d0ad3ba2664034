"""The tree of commands: arguments and options with their defaults and variables, and the codes that commands exit with.

What the code says is read, not what a version of Typer makes of it: names are Typer's, types and defaults are not.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any, get_args, get_type_hints

import typer
from tests.unit.pins.freezing import frozen

from headrace.cli.airflow_commands import airflow_commands
from headrace.cli.main import COMMANDS, app


def test_commands() -> None:
    root: Any = typer.main.get_command(app)
    airflow: Any = airflow_commands()[0]
    lines = [
        f"headrace {' '.join(name for parameter in root.params for name in parameter.opts)}",
        f"airflow {airflow.name} {'|'.join(sorted(subcommand.name for subcommand in airflow.subcommands))}",
    ]
    for noun, entry in COMMANDS.items():
        verbs = {"": entry.verbs} if isinstance(entry.verbs, str) else entry.verbs
        for verb, target in verbs.items():
            module, _, name = target.partition(":")
            command = root.commands[noun].commands[verb] if verb else root.commands[noun]
            lines += described(f"headrace {noun} {verb}".strip(), command, getattr(import_module(module), name))
    frozen("commands.txt", "\n".join(lines) + "\n")


def described(name: str, command: Any, function: Callable[..., None]) -> Iterator[str]:
    """The command's lines: its name and exit codes, and what it takes."""
    codes = sorted(exit_codes(function))
    yield f"{name}{': exits with ' + ', '.join(map(str, codes)) if codes else ''}"
    hints, defaults = get_type_hints(function), inspect.signature(function).parameters
    for parameter in command.params:
        if parameter.name in hints:
            default = defaults[parameter.name].default
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            variable = f" ${parameter.envvar}" if parameter.envvar else ""
            value = "" if default is inspect.Parameter.empty else f" = {default}"
            required = " required" if parameter.required else ""
            yield f"  {parameter.param_type_name} {names}{variable} {_type(hints[parameter.name])}{required}{value}"


def _type(hint: Any) -> str:
    """A type without the module of its name, which is another one in Python 3.13; the choices of an enumeration."""
    if args := get_args(hint):
        inner = "|".join(_type(argument) for argument in args if argument is not type(None))
        return f"[{inner}]" if getattr(hint, "__origin__", None) is list else inner
    if issubclass(hint, Enum):
        return "|".join(str(member.value) for member in hint)
    return str(hint.__name__)


def exit_codes(function: Callable[..., None]) -> set[int]:
    """What ``typer.Exit`` is given in the function, and in the functions of its module that it calls."""
    module: Any = inspect.getmodule(function)
    bodies = {
        node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)
    }
    found, names = set(), [function.__name__]
    while names:
        for node in ast.walk(bodies.pop(names.pop(), ast.Pass())):
            if isinstance(node, ast.Name):
                names.append(node.id)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Exit":
                found.add(int(eval(ast.unparse(node.args[0]), vars(module))))  # noqa: S307 - a number or a constant
    return found
