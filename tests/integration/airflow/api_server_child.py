"""A child process of test_api_rights.py: Airflow's own API server application, on a migrated database of its own.

Prints one JSON object: for each user and request the status, and what some requests had as consequences.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HOME = Path(os.environ["AIRFLOW_HOME"])
USERS = {"admin": "admin", "op": "op", "user": "user", "viewer": "viewer"}
BATCHES = 5
READS = (
    "/streams",
    "/streams/orders",
    "/streams/orders/timeline",
    "/streams/orders/batches",
    "/streams/orders/batches/{time}",
    "/streams/orders/events",
    "/streams/orders/gaps",
    "/streams/orders/stop/preview",
    "/streams/orders/start/preview",
    "/streams/orders/batches/{time}/run/preview",
    "/streams/orders/batches/{time}/abandon/preview",
    "/streams/orders/batches/{time}/replay/preview?target=orders_replay_v2",
    "/dags/orders_batches",
)
# In this order: what one leaves behind, the next finds.
ACTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/streams/orders/stop", {"reason": "a test"}),
    ("/streams/orders/start", {}),
    ("/streams/orders/batches/{time}/run", {"reason": "a test"}),
    ("/streams/orders/batches/{time}/run", {}),
    ("/streams/orders/batches/{time}/replay", {"target": "orders_replay_v2"}),
    ("/streams/orders/batches/{time}/abandon", {"reason": "a test"}),
)


def prepare() -> str:
    """Put the stream's DAGs into Airflow's database, and make the stream's ledger. Returns the ledger's URL."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from tests.support.seeded_ledger import seed

    from headrace.ledger import Ledger

    DagBundlesManager().sync_bundles_to_db()
    bag = DagBag(str(HOME / "dags"), bundle_path=HOME / "dags", bundle_name="dags-folder")
    assert not bag.import_errors, bag.import_errors
    sync_bag_to_db(bag, "dags-folder", None)
    url = f"sqlite:///{HOME}/ledger.db"
    with Ledger.open(url) as ledger:
        seed(ledger, streams=1, batches=BATCHES)
    return url


def main() -> None:
    """Ask every route as every user."""
    url = prepare()
    from airflow.api_fastapi.app import create_app
    from fastapi.testclient import TestClient

    from headrace.ledger import Ledger
    from headrace.ledger.states import EventKind

    statuses: dict[str, list[Any]] = {}
    with TestClient(create_app()) as client:
        passwords = json.loads((HOME / "passwords.json").read_text())
        tokens: dict[str, str | None] = {"anonymous": None}
        for user in USERS:
            answer = client.post("/auth/token", json={"username": user, "password": passwords[user]})
            tokens[user] = answer.json()["access_token"]
        listed = client.get("/headrace/api/v1/streams/orders/batches", headers=_bearer(tokens["admin"])).json()
        time = listed["batches"][0]["batch_time"]
        for user, token in tokens.items():
            statuses[user] = []
            for path in READS:
                answer = client.get("/headrace/api/v1" + path.format(time=time), headers=_bearer(token))
                statuses[user].append(["GET", path, answer.status_code, answer.text[:300]])
            for path, body in ACTIONS:
                address = "/headrace/api/v1" + path.format(time=time)
                answer = client.post(address, json=body, headers=_bearer(token))
                statuses[user].append(["POST", path, answer.status_code, answer.text[:300]])
        cookie = {"Cookie": f"_token={tokens['admin']}"}
        forged = client.post("/headrace/api/v1/streams/orders/stop", content="{}", headers=cookie).status_code
        crossed = client.post(
            "/headrace/api/v1/streams/orders/stop", json={}, headers={**cookie, "Sec-Fetch-Site": "cross-site"}
        ).status_code
        own = client.get("/headrace/api/v1/streams", headers=cookie)
        summary = own.json()["streams"][0]
        page = client.get("/headrace/").status_code
        runs = client.get("/api/v2/dags/~/dagRuns", headers=_bearer(tokens["admin"])).json()["dag_runs"]
        paths = client.get("/headrace/api/openapi.json").json()["paths"]
    with Ledger.open(url) as ledger:
        kinds = [EventKind.OPERATOR_ACTION, EventKind.STREAM_STATE_CHANGED, EventKind.BATCH_ABANDONED]
        by = [[event.kind, event.payload.get("by")] for event in reversed(ledger.events.latest("orders", kinds))]
    print(
        json.dumps(
            {
                "statuses": statuses,
                "forged": [forged, crossed],
                "summary": {name: summary[name] for name in ("name", "state", "reason", "replay_dag_ids", "may")},
                "page": page,
                "runs": [[run["dag_id"], run["run_type"], run["triggering_user_name"]] for run in runs],
                "paths": sorted(paths),
                "by": by,
            }
        )
    )


def _bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


if __name__ == "__main__":
    sys.exit(main())
