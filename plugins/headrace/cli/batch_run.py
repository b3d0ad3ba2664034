"""`headrace batches run`: runs a batch again, as the page does, through the API of headrace in Airflow's API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from headrace.cli.batches import BatchTime
from headrace.cli.commands import examples
from headrace.cli.options import AIRFLOW_VARIABLE, AsJson, StreamName, milliseconds
from headrace.cli.output import echo, print_json

if TYPE_CHECKING:
    from headrace.connections import Connection
    from headrace.devstack.airflow_api import AirflowApi

# Airflow's own types for a server that is reached by HTTP.
_TYPES = ("http", "https")


@examples(
    "batches run orders 2026-11-21T14:05Z --reason 'the mapping was corrected'",
    "batches run orders 2026-11-21T14:05Z --output orders-es --preview",
)
def run(
    name: StreamName,
    batch_time: BatchTime,
    *,
    airflow: Annotated[
        str,
        typer.Option(
            "--airflow",
            envvar=AIRFLOW_VARIABLE,
            metavar="CONNECTION",
            help="The id of the connection to Airflow's API server: its host, and a user who may run the batch DAG.",
        ),
    ],
    output: Annotated[
        list[str] | None, typer.Option(help="Only this output; may be given several times. By default all.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="The reason; it is kept with the stream's events.")] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Only say what it would do, or why not.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a batch again, with the same records: clear its Airflow run, or trigger one.

    It returns when Airflow has queued the run. `headrace batches show` follows it.
    """
    path = f"//headrace/api/v1/streams/{name}/batches/{milliseconds(batch_time, 'TIME')}/run"
    api = _api(airflow)
    if preview:
        query = f"?{urlencode({'outputs': output}, doseq=True)}" if output else ""
        found = api.request("GET", f"{path}/preview{query}")
        print_json(found) if as_json else echo(found["refused"] or found["will"])
        return
    done = api.request("POST", path, {"reason": reason, "outputs": output})
    print_json(done) if as_json else echo(done["done"])


def _api(conn_id: str) -> AirflowApi:
    from headrace.connections import resolve
    from headrace.devstack.airflow_api import AirflowApi

    connection = resolve(conn_id)
    connection.check_type(*_TYPES)
    return AirflowApi(_url(connection), connection.login or "", connection.password or "")


def _url(connection: Connection) -> str:
    """The server's URL. As in Airflow's HTTP connections, the scheme is in the host, or is the schema."""
    host = connection.host or "localhost"
    if "://" not in host:
        scheme = (connection.schema or connection.conn_type or "http").lower()
        host = f"{scheme}://{host}"
    return f"{host.rstrip('/')}:{connection.port}" if connection.port else host
