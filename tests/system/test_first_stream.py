"""docs/first-stream.md, step by step: its code and its commands as they are printed there, on a stack of its own."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest
from tests.system.newcomer import Newcomer, Page, eventually, newcomer

from headrace.ledger import Ledger

PAGE = Page("first-stream.md")

pytestmark = pytest.mark.timeout(1800)


def send(person: Newcomer, produced: str | None = None) -> None:
    """Step 3, or only another record."""
    script = PAGE.block("create_topics").replace("127.0.0.1:PORT", person.kafka)
    if produced is not None:
        script = re.sub(r"^admin\..*\n", "", script, flags=re.MULTILINE)
        script = re.sub(r"^producer\.produce.*$", lambda _: produced, script, flags=re.MULTILINE)
    person.type(script)


def totals(person: Newcomer) -> list[int | None]:
    return [each["_source"].get("total") for each in person.documents("orders")]


@pytest.fixture
def person() -> Iterator[Newcomer]:
    with newcomer(PAGE) as person:
        yield person


def test_the_tutorial_does_what_it_says(person: Newcomer) -> None:
    dags = person.folder / "mine" / "dags"
    dag_file = dags / "orders.py"
    dag_file.write_text(PAGE.block("Airflow looks into files that mention"))
    send(person)
    for dag_id in ("orders_receiver", "orders_batches"):
        person.airflow.wait_for_dag(dag_id)
        person.airflow.unpause(dag_id)
    (document,) = eventually(lambda: person.documents("orders"), "the record did not become a document")
    assert re.fullmatch(r"orders\+[01]\+0", document["_id"])
    assert document["_source"] == {"item": "cup", "pieces": 2}

    look = PAGE.block("batches show orders TIME")
    ledger, show_stream, listing, show = look.splitlines()
    assert "Receiver job running" in person.type(f"{ledger}\n{show_stream}")
    batches = json.loads(person.type(f"{ledger}\n{listing} --json"))["batches"]
    (batch,) = [each for each in batches if each["records"]]
    shown = person.type(f"{ledger}\n{show.replace('TIME', str(batch['batch_time_ms']))}")
    assert "elasticsearch" in shown

    with_transform = dag_file.read_text().replace("KafkaInput,", "JsonDecoder, KafkaInput, SparkSettings,")
    change = PAGE.block("value_decoder=JsonDecoder").replace("...", 'connection="kafka_default", topics="orders"')
    with_transform = re.sub(r"^    inputs=.*\n", lambda _: change, with_transform, flags=re.MULTILINE)
    (dags / "orders_transform.py").write_text(PAGE.block("def with_total"))
    dag_file.write_text(with_transform)
    # "Airflow reads the changed file within half a minute": before, a batch would still run without the transform.
    with Ledger.open(f"sqlite:///{person.folder}/mine/orders/ledger.db") as opened:
        eventually(lambda: opened.streams.get("orders").revision == 2, "Airflow did not read the changed file")
    assert json.loads(person.type(f"{ledger}\n{show_stream} --json"))["revision"] == 2
    person.type(f"{ledger}\n{PAGE.block('headrace streams start orders')}")
    send(person, """producer.produce("orders", value='{"item": "pot", "cents": 350, "pieces": 2}')""")
    eventually(lambda: 700 in totals(person), "no document has a total")

    send(person, 'producer.produce("orders", value="broken")')
    (letter,) = eventually(lambda: person.documents("orders-dead-letters"), "there is no dead letter")
    assert "JSON" in letter["_source"]["reason"]["text"]
    listed = person.type(PAGE.block("headrace stack env"))
    assert "1 dead letter" in listed

    person.type(f"{ledger}\n.venv/bin/headrace streams stop orders --wait 60")
    os.kill(person.terminal.pid, signal.SIGINT)
    assert person.terminal.wait(120) == 0
