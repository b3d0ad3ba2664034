"""docs/guides/registry.md and change-events.md, "In ten minutes": what they print, pasted, on a stack of their own."""

from __future__ import annotations

import pytest
from tests.system.newcomer import Newcomer, Page, eventually, newcomer

pytestmark = pytest.mark.timeout(1800)


def unpause(person: Newcomer, stream: str) -> None:
    for dag_id in (f"{stream}_receiver", f"{stream}_batches"):
        person.airflow.wait_for_dag(dag_id)
        person.airflow.unpause(dag_id)


def test_the_guides_lead_from_nothing_to_documents() -> None:
    registry, changes = Page("guides/registry.md"), Page("guides/change-events.md")
    with newcomer(registry) as person:
        dags = person.folder / "mine" / "dags"
        (dags / "purchases.py").write_text(registry.block("receiver, batches = stream_dags"))
        (dags / "changes.py").write_text(changes.block("receiver, batches = stream_dags"))
        script = registry.block("AvroSerializer(registry")
        script = script.replace("127.0.0.1:KAFKA", person.kafka)
        person.type(script.replace("http://127.0.0.1:REGISTRY/apis/ccompat/v7", person.address["registry"]))
        person.type(changes.block("create_topics").replace("127.0.0.1:KAFKA", person.kafka))
        for stream in ("purchases", "changes"):
            unpause(person, stream)
        (document,) = eventually(lambda: person.documents("purchases"), "the purchase did not become a document")
        assert document["_source"] == {"item": "cup", "pieces": 2}
        (document,) = eventually(lambda: person.documents("shop-orders"), "the row did not become a document")
        assert (document["_id"], document["_source"]["name"]) == ("2", "teapot")
        checked = person.type(registry.block("streams check purchases:stream"))
        assert "version 1 of subject purchases-value for the value: `item` STRING" in checked
        as_json = registry.block("streams check purchases:stream").rstrip() + " --json"
        assert person.type(as_json).lstrip().startswith("{")
