"""The options and arguments that commands share, how their texts are read, and the examples in a command's help.

If neither ``--ledger`` nor ``HEADRACE_LEDGER`` names the ledger, a file does: ``headrace.toml`` in the working
directory, else ``config.toml`` in the user's own configuration folder (``~/.config/headrace``). Its only setting is
``ledger``.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.clock import SystemClock, parse_time, time_text
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.stream import Stream


FILE = "headrace.toml"
LEDGER_VARIABLE = "HEADRACE_LEDGER"
AIRFLOW_VARIABLE = "HEADRACE_AIRFLOW"
EXECUTOR_VARIABLE = "AIRFLOW__CORE__EXECUTOR"

_UNIT_MS = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 604_800_000}
_AGO = re.compile(rf"([0-9]+) *({'|'.join(_UNIT_MS)})s? ago")


class NoLedgerError(HeadraceError):
    """Nothing says which ledger to use."""


class ConfigurationError(HeadraceError):
    """The configuration file cannot be read, or has a setting that does not exist."""


def user_file() -> Path:
    """The user's own configuration file, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "headrace" / "config.toml"


def configured_ledger() -> str:
    """The ledger of the configuration file.

    Raises:
        NoLedgerError: there is no such file, or it names no ledger.
        ConfigurationError: the file is invalid.
    """
    ledger = configured_ledger_if_any()
    if ledger is None:
        raise NoLedgerError(
            "It is not known where the ledger is.",
            remedy=f'Give --ledger URL, set HEADRACE_LEDGER, or write `ledger = "URL"` into {FILE} in this folder or '
            f'into {user_file()}. For the embedded stack: eval "$(headrace stack env)".',
        )
    return ledger


def configured_ledger_if_any() -> str | None:
    """`configured_ledger`, None if no file names a ledger. Raises ConfigurationError."""
    for path in (Path(FILE), user_file()):
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path.absolute()} cannot be read: {error}.", remedy="Correct it.") from None
        if unknown := sorted(settings.keys() - {"ledger"}):
            raise ConfigurationError(
                f"{path.absolute()} has an unknown setting: {', '.join(unknown)}.",
                remedy="The only setting is `ledger`.",
            )
        ledger = settings.get("ledger")
        if ledger is not None and not (isinstance(ledger, str) and ledger):
            raise ConfigurationError(
                f"In {path.absolute()}, `ledger` is not a text.",
                remedy='Write it as ledger = "sqlite:////folder/ledger.db".',
            )
        if ledger is not None:
            return ledger
    return None


def _ledger_option(configured: Callable[[], str | None]) -> Any:
    def given_or_configured(ctx: typer.Context, given: str) -> str | None:
        # A shell's completion parses too, and must not fail.
        return given if given or ctx.resilient_parsing else configured()

    return typer.Option(
        "--ledger",
        envvar=LEDGER_VARIABLE,
        default_factory=str,
        callback=given_or_configured,
        show_default=FILE,
        metavar="URL",
        help='A SQLAlchemy URL, or "connection:<id>" with AIRFLOW_CONN_<ID> set.',
    )


def stream_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the ledger's streams, for a shell's completion; none if the ledger does not answer."""
    try:
        with opened(ctx.params.get("ledger") or os.environ.get(LEDGER_VARIABLE) or configured_ledger()) as ledger:
            return [row.name for row in ledger.streams.all() if row.name.startswith(incomplete)]
    except Exception:
        # An error's text would end up in the command line that the user types.
        return []


LedgerUrl = Annotated[str, _ledger_option(configured_ledger)]
OptionalLedgerUrl = Annotated[str | None, _ledger_option(configured_ledger_if_any)]
StreamName = Annotated[str, typer.Argument(metavar="NAME", help="The stream's name.", autocompletion=stream_names)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def opened(url: str) -> Iterator[Ledger]:
    """Open the ledger at this URL. Never creates one: a mistyped path must not create an empty database.

    Raises:
        LedgerError: there is no ledger, or it is of another version.
    """
    from headrace.ledger import Ledger

    with Ledger.open(url, create=False) as ledger:
        yield ledger


def defined(definition: str) -> Stream:
    """The stream of a JSON file, or of module:attribute, also of a module in the current folder. Raises as
    `Stream.load` does."""
    from headrace.cli.output import log_to_standard_error
    from headrace.stream import Stream

    sys.path.insert(0, "")
    stream = Stream.load(definition)
    # Its module may have imported Airflow.
    log_to_standard_error()
    return stream


def registered(ledger: Ledger, name: str) -> Stream:
    """The stream as the ledger has it. Raises what ``ledger.streams.get`` raises."""
    from headrace.stream import Stream

    return Stream.from_json(ledger.streams.get(name).definition)


def milliseconds(text: str, option: str) -> int:
    """Parse an ISO 8601 time (UTC if it names no zone), "2 hours ago" or epoch milliseconds into epoch milliseconds.

    Raises:
        BadParameter: the text is none of these; the error names ``option``.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    if ago := _AGO.fullmatch(text.strip()):
        return SystemClock().now_ms() - int(ago[1]) * _UNIT_MS[ago[2]]
    try:
        return parse_time(text)
    except ValueError:
        raise typer.BadParameter(
            f'{text!r} is no time: give ISO 8601, such as 2026-11-21T14:05Z, or "2 hours ago"', param_hint=option
        ) from None


def batch_time(text: str, option: str, *, interval_ms: int) -> int:
    """Parse a batch time of a stream with this batch interval into epoch milliseconds.

    Raises:
        BadParameter: the text is not a time, or not a batch time; the error names ``option``, and for the latter the
            nearest batch times.
    """
    batch_time_ms = milliseconds(text, option)
    since = batch_time_ms % interval_ms
    if since:
        before, after = time_text(batch_time_ms - since), time_text(batch_time_ms - since + interval_ms)
        raise typer.BadParameter(
            f"{time_text(batch_time_ms)} is no batch time: the one before it is {before}, the one after it {after}",
            param_hint=option,
        )
    return batch_time_ms


def examples(*lines: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command examples for its help, each without the word headrace."""

    def marked(function: Callable[..., None]) -> Callable[..., None]:
        _EXAMPLES[function] = lines
        return function

    return marked


def examples_of(function: Callable[..., None]) -> tuple[str, ...]:
    """The examples of the command that runs ``function``."""
    return _EXAMPLES.get(function, ())


_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {}
