"""`headrace stack env`: the environment in which the other commands find the embedded stack's servers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from headrace.cli.commands import examples
from headrace.cli.options import AIRFLOW_VARIABLE, LEDGER_VARIABLE, AsJson
from headrace.cli.output import echo
from headrace.cli.stack import Data
from headrace.connections import CONNECTION_PREFIX, variable_name
from headrace.devstack.errors import LocalStackError
from headrace.devstack.stack import LEDGER_CONNECTION
from headrace.devstack.state import Phase, StackState, read_state

AIRFLOW_CONNECTION = "headrace_airflow"
"""The connection to the stack's Airflow, by which commands log in to its API."""


@examples("stack env", "stack env --data mine/data --json")
def env(*, data: Data = Path(".headrace"), as_json: AsJson = False) -> None:
    """Print the exports with which commands find the stack's ledger, Kafka and Elasticsearch.

    In a shell: eval "$(headrace stack env)". The values go from the output to the shell's variables, and so not through
    the process list.
    """
    data = data.absolute()
    state = read_state(data)
    if state is None or state.as_found().phase is not Phase.RUNNING:
        raise LocalStackError(f"No stack runs in {data}.", remedy=f"Start it: `headrace stack up --data {data}`.")
    variables = environment(state)
    if as_json:
        echo(json.dumps(variables, indent=2))
        return
    for name, value in variables.items():
        echo(f"export {name}={shlex.quote(value)}")


def environment(state: StackState) -> dict[str, str]:
    """The variables: ``AIRFLOW_CONN_…`` for each connection, and the names of the ledger's and Airflow's if it has
    them."""
    found = {variable_name(conn_id): json.dumps(fields) for conn_id, fields in state.connections.items()}
    if LEDGER_CONNECTION in state.connections:
        found[LEDGER_VARIABLE] = f"{CONNECTION_PREFIX}{LEDGER_CONNECTION}"
    airflow = state.services.get("api-server")
    if airflow is not None and airflow.address is not None and state.login is not None:
        passwords = json.loads(Path(state.login.password_file).read_text(encoding="utf-8"))
        found[AIRFLOW_VARIABLE] = AIRFLOW_CONNECTION
        found[variable_name(AIRFLOW_CONNECTION)] = json.dumps(
            {
                "conn_type": "http",
                "host": airflow.address,
                "login": state.login.user,
                "password": passwords[state.login.user],
            }
        )
    return found
