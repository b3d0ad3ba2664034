"""Finds the ledger that commands use if neither ``--ledger`` nor ``HEADRACE_LEDGER`` gives it: in a file.

The file is ``headrace.toml`` in the working directory, else ``config.toml`` in the user's own configuration folder
(``~/.config/headrace``). Its only setting is ``ledger``.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from headrace.errors import HeadraceError

FILE = "headrace.toml"


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
