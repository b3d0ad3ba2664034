"""docs/first-stream.md, step by step: its code and its commands as they are printed there, on a stack of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.guarded_process import child_environment
from headrace.devstack.postgres import PostgresServer
from headrace.devstack.state import STACK_VARIABLE, Phase, StackState, end_stack_processes, read_state
from headrace.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "first-stream.md").read_text()
SECONDS = 600.0

pytestmark = pytest.mark.timeout(1800)


def block(containing: str) -> str:
    """The tutorial's only block with this text."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)
    found = [each for each in blocks if containing in each]
    assert len(found) == 1, containing
    return str(found[0])


def eventually(what: Callable[[], Any], reason: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline, reason
        time.sleep(0.5)
    return found


class Newcomer:
    """A person in a folder with ``.venv``, who has started the servers in one terminal and types into another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in child_environment().items() if k not in (STACK_VARIABLE, "VIRTUAL_ENV")}
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "mine" / "dags").mkdir(parents=True)
        _, _, up = block("headrace stack up").splitlines()
        with (folder / "up.log").open("w") as log:
            self.terminal = subprocess.Popen(
                ["bash", "-c", f"exec {up}"], cwd=folder, env=self.environment, stdout=log, stderr=log
            )
        self.stack: StackState = eventually(self._running, "the stack did not start")
        address = {name: service.address or "" for name, service in self.stack.services.items()}
        self.kafka, self.elasticsearch = address["kafka"], httpx.Client(base_url=address["elasticsearch"], timeout=120)
        assert self.stack.login is not None
        password = json.loads(Path(self.stack.login.password_file).read_text())[self.stack.login.user]
        self.airflow = AirflowApi(address["api-server"], self.stack.login.user, password, timeout=120)

    def _running(self) -> StackState | None:
        assert self.terminal.poll() is None, (self.folder / "up.log").read_text()
        state = read_state(self.folder / "mine" / "data")
        return state if state is not None and state.as_found().phase is Phase.RUNNING else None

    def type(self, script: str) -> str:
        """What the commands print; they succeed."""
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def send(self, produced: str | None = None) -> None:
        """Step 3, or only another record."""
        script = block("create_topics").replace("127.0.0.1:PORT", self.kafka)
        if produced is not None:
            script = re.sub(r"^admin\..*\n", "", script, flags=re.MULTILINE)
            script = re.sub(r"^producer\.produce.*$", lambda _: produced, script, flags=re.MULTILINE)
        self.type(script)

    def documents(self, index: str = "orders") -> list[dict[str, Any]]:
        if self.elasticsearch.post(f"/{index}/_refresh").status_code == 404:
            return []
        hits: list[dict[str, Any]] = self.elasticsearch.get(f"/{index}/_search").json()["hits"]["hits"]
        return hits

    def totals(self) -> list[int | None]:
        return [each["_source"].get("total") for each in self.documents()]

    def close(self) -> None:
        if self.terminal.poll() is None:
            self.terminal.send_signal(signal.SIGTERM)
            self.terminal.wait(120)
        self.elasticsearch.close()


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    # Not below pytest's own temporary folder: that is closed to others, and Postgres runs as nobody under root.
    folder = Path(tempfile.mkdtemp(prefix="headrace-newcomer-"))
    folder.chmod(0o755)
    person = Newcomer(folder)
    yield person
    person.close()
    assert end_stack_processes(person.stack.id, person.stack.recorded_processes()) == []
    PostgresServer(folder / "mine" / "data" / "postgres").wipe()
    shutil.rmtree(folder, ignore_errors=True)


def test_the_tutorial_does_what_it_says(newcomer: Newcomer) -> None:
    dags = newcomer.folder / "mine" / "dags"
    dag_file = dags / "orders.py"
    dag_file.write_text(block("Airflow looks into files that mention"))
    newcomer.send()
    for dag_id in ("orders_receiver", "orders_batches"):
        newcomer.airflow.wait_for_dag(dag_id)
        newcomer.airflow.unpause(dag_id)
    (document,) = eventually(newcomer.documents, "the record did not become a document")
    assert re.fullmatch(r"orders\+[01]\+0", document["_id"])
    assert document["_source"] == {"item": "cup", "pieces": 2}

    look = block("batches show orders TIME")
    ledger, show_stream, listing, show = look.splitlines()
    assert "Receiver job running" in newcomer.type(f"{ledger}\n{show_stream}")
    batches = json.loads(newcomer.type(f"{ledger}\n{listing} --json"))["batches"]
    (batch,) = [each for each in batches if each["records"]]
    shown = newcomer.type(f"{ledger}\n{show.replace('TIME', str(batch['batch_time_ms']))}")
    assert "elasticsearch" in shown

    with_transform = dag_file.read_text().replace("KafkaInput,", "JsonDecoder, KafkaInput, SparkSettings,")
    change = block("value_decoder=JsonDecoder").replace("...", 'connection="kafka_default", topics="orders"')
    with_transform = re.sub(r"^    inputs=.*\n", lambda _: change, with_transform, flags=re.MULTILINE)
    (dags / "orders_transform.py").write_text(block("def with_total"))
    dag_file.write_text(with_transform)
    # "Airflow reads the changed file within half a minute": before, a batch would still run without the transform.
    with Ledger.open(f"sqlite:///{newcomer.folder}/mine/orders/ledger.db") as opened:
        eventually(lambda: opened.streams.get("orders").revision == 2, "Airflow did not read the changed file")
    assert json.loads(newcomer.type(f"{ledger}\n{show_stream} --json"))["revision"] == 2
    newcomer.type(f"{ledger}\n{block('headrace streams start orders')}")
    newcomer.send("""producer.produce("orders", value='{"item": "pot", "cents": 350, "pieces": 2}')""")
    eventually(lambda: 700 in newcomer.totals(), "no document has a total")

    newcomer.send('producer.produce("orders", value="broken")')
    (letter,) = eventually(lambda: newcomer.documents("orders-dead-letters"), "there is no dead letter")
    assert "JSON" in letter["_source"]["reason"]["text"]
    listed = newcomer.type(block("headrace stack env"))
    assert "1 dead letter" in listed

    newcomer.type(f"{ledger}\n.venv/bin/headrace streams stop orders --wait 60")
    os.kill(newcomer.terminal.pid, signal.SIGINT)
    assert newcomer.terminal.wait(120) == 0
