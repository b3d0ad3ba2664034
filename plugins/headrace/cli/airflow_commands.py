"""The commands as `airflow headrace …`, where the ledger and the connections are Airflow's.

The ledger is the setting ``[headrace] ledger``, unless ``--ledger`` or ``HEADRACE_LEDGER`` names another. Connections
are looked up as Airflow does it: in the environment, the secrets backends and the metadata database.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from airflow.cli.cli_config import ActionCommand, Arg, CLICommand, GroupCommand

from headrace.cli.main import COMMANDS

_LEFT_OUT = {"stack"}
"""The embedded stack starts an Airflow of its own."""


def airflow_commands() -> list[CLICommand]:
    """The group of commands that Airflow's command line adds. Called at each start of `airflow`: imports no command."""
    return [
        GroupCommand(
            name="headrace",
            help="Streams from Kafka to Elasticsearch",
            description="Streams, batches, dead letters and the ledger of headrace.",
            subcommands=[
                ActionCommand(name=name, help=noun.help, func=_run, args=(_AllArguments(name),))
                for name, noun in COMMANDS.items()
                if name not in _LEFT_OUT
            ],
        )
    ]


class _AllArguments(Arg):
    """All that follows the noun, ``--help`` too. The command itself parses it, and so completes, checks and explains it
    as `headrace` does."""

    def __init__(self, noun: str) -> None:
        super().__init__(flags=("arguments",), help="A command and its options.")  # type: ignore[no-untyped-call]
        self._noun = noun

    def add_to_parser(self, parser: argparse.ArgumentParser) -> None:
        def parse(args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
            parsed = namespace or argparse.Namespace()
            parsed.func = parser.get_default("func")
            parsed.arguments = [self._noun, *(args or ())]
            return parsed, []

        # argparse's own REMAINDER does not take an option that comes first.
        parser.parse_known_args = parse  # type: ignore[method-assign, assignment]


def _run(arguments: argparse.Namespace) -> None:
    from airflow.configuration import conf

    from headrace import connections
    from headrace.cli.main import app
    from headrace.cli.options import EXECUTOR_VARIABLE, LEDGER_VARIABLE
    from headrace.cli.output import log_to_standard_error

    log_to_standard_error()
    connections.look_up_by(_connection_json)
    allowed = conf.get("apache_kafka", "callback_allowlist", fallback="") or ""
    os.environ.setdefault(connections.ALLOWLIST_VARIABLE, allowed)
    os.environ.setdefault(LEDGER_VARIABLE, conf.get("headrace", "ledger"))
    os.environ.setdefault(EXECUTOR_VARIABLE, conf.get("core", "executor"))
    app(args=arguments.arguments, prog_name="airflow headrace")


def _connection_json(conn_id: str) -> str | None:
    """The connection in Airflow's JSON form, None if Airflow has none with this id."""
    from airflow.models.connection import Connection
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        # Its loggers take the standard output of the moment in which they are made.
        with contextlib.redirect_stdout(sys.stderr):
            return Connection.get_connection_from_secrets(conn_id).as_json()
    except AirflowNotFoundException:
        return None
