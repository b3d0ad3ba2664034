"""`headrace batches run`: how it finds Airflow. tests/system/test_stream.py runs a batch again with it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app

COMMAND = ["batches", "run", "orders", "2026-11-21T14:05Z"]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://u:p@127.0.0.1:9/", "http://127.0.0.1:9"),
        ("https://u:p@127.0.0.1:9", "https://127.0.0.1:9"),
        ("http://u:p@127.0.0.1:9/https", "https://127.0.0.1:9"),
        ('{"conn_type": "http", "host": "http://127.0.0.1:9/airflow"}', "http://127.0.0.1:9/airflow"),
        ('{"host": "127.0.0.1", "port": 9}', "http://127.0.0.1:9"),
    ],
)
def test_a_connection_is_a_url(text: str, url: str) -> None:
    done = CliRunner().invoke(app, COMMAND, env={"HEADRACE_AIRFLOW": "web", "AIRFLOW_CONN_WEB": text})
    assert done.exit_code == 1
    assert f"POST {url}/auth/token got no answer" in " ".join(done.output.split())


def test_a_connection_to_another_kind_of_server_is_refused() -> None:
    done = CliRunner().invoke(app, [*COMMAND, "--airflow", "web"], env={"AIRFLOW_CONN_WEB": "kafka://127.0.0.1:9"})
    assert "is of type 'kafka'" in " ".join(done.output.split())
