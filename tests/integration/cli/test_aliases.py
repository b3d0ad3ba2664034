"""`headrace aliases swap`: a real Elasticsearch, and a ledger with a stream whose history was replayed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.clock import time_text
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.errors import ElasticsearchRefusedError, UnsuitableTargetError
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream
from headrace.stream.stream import replayed

TIMES = (10_000, 20_000, 30_000)


class Shop:
    """The stream `shop`, which writes through the alias `live` into `old`; its replay `v2` writes `new`."""

    def __init__(self, url: str, folder: Path) -> None:
        prefix = f"alias-{uuid.uuid4().hex[:8]}"
        self.live, self.old, self.new = (f"{prefix}-{name}" for name in ("live", "old", "new"))
        self.stream = Stream(
            name="shop",
            inputs=KafkaInput(bootstrap_servers="localhost:9", topics="clicks"),
            outputs=ElasticsearchOutput(hosts=url, index=self.live),
            batch_interval="10 s",
            storage=folder / "storage",
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        self.cluster = Cluster.of(self.stream.outputs[0])  # type: ignore[arg-type]
        self.transport = ElasticsearchTransport(self.cluster, connections=1, timeout_seconds=30)
        self.ask("PUT", f"/{self.old}", {"aliases": {self.live: {"filter": {"term": {"kind": "click"}}}}})
        self.ask("PUT", f"/{self.new}")
        with Ledger.open(self.stream.ledger) as ledger:
            register(ledger, self.stream)
            for at_ms in TIMES:
                ledger.allocations.allocate("shop", at_ms, manifest_uri="m", manifest_sha256="0")
                self._complete(ledger, ledger.attempts.begin("shop", at_ms, **_BEGIN))

    def replay(self, *times_ms: int, index: str | None = None) -> None:
        definition = replayed(self.stream, {"elasticsearch": {"index": index or self.new}}).to_json()
        with Ledger.open(self.stream.ledger) as ledger:
            for at_ms in times_ms:
                self._complete(
                    ledger,
                    ledger.replays.begin(
                        "shop", at_ms, target="v2", definition=definition, outputs=["elasticsearch"], **_BEGIN
                    ),
                )

    @staticmethod
    def _complete(ledger: Ledger, attempt: Any) -> None:
        ledger.attempts.record_output(attempt, "elasticsearch", {})
        ledger.attempts.complete(attempt)

    def swap(self, *options: str, to: str | None = None) -> Result:
        arguments = ["aliases", "swap", "shop", "elasticsearch", "--to", to or self.new, "--replay", "v2"]
        return CliRunner().invoke(app, [*arguments, "--ledger", self.stream.ledger, *options])

    def administration(self) -> Administration:
        return Administration.of(self.cluster, timeout_seconds=30, max_retry_seconds=10)

    def points_to(self) -> list[str]:
        return sorted(self.ask("GET", f"/_alias/{self.live}"))

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.transport.request(method, path, None if body is None else json.dumps(body).encode())
        assert answer.status == 200, answer
        return answer.json()


_BEGIN: dict[str, Any] = {"holder": "test", "way": "submit", "lease_ms": 60_000}


@pytest.fixture
def shop(elasticsearch: str, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(elasticsearch, tmp_path)
    yield made
    made.ask("DELETE", f"/{made.old},{made.new}")
    made.transport.close()


def test_the_alias_moves_with_its_filter(shop: Shop) -> None:
    shop.replay(*TIMES)
    reported = json.loads(shop.swap("--json").stdout)
    assert (reported["old_index"], reported["new_index"]) == (shop.old, shop.new)
    assert (reported["run_again"], reported["abandoned"], reported["not_replayed"]) == ([], [], [])
    assert shop.points_to() == [shop.new]
    held = shop.ask("GET", f"/_alias/{shop.live}")[shop.new]["aliases"][shop.live]
    assert held == {"filter": {"term": {"kind": "click"}}}
    again = shop.swap()
    assert again.exit_code == 0
    assert "already" in again.output


def test_a_replay_that_lacks_batches_is_refused_by_their_names(shop: Shop) -> None:
    shop.replay(20_000)
    result = shop.swap()
    assert result.exit_code == 1
    assert "lacks 1 batch(es)" in result.output
    assert time_text(30_000) in result.output
    assert shop.points_to() == [shop.old]


def test_a_swap_names_batches_after_until_and_before_the_replay(shop: Shop) -> None:
    """Those after --until are to be run again; those before the replay are not in the new index."""
    shop.replay(20_000)
    result = shop.swap("--until", "1970-01-01T00:00:20Z")
    assert result.exit_code == 0, result.output
    assert shop.points_to() == [shop.new]
    assert f"1 batch(es) are not in {shop.new}, or may not be" in result.output
    assert time_text(30_000) in result.output
    assert f"1 batch(es) are older than the replay, so their documents are not in {shop.new}" in result.output


def test_an_index_that_the_replay_did_not_write_is_refused(shop: Shop) -> None:
    shop.replay(*TIMES, index="another")
    result = shop.swap()
    assert result.exit_code == 1
    assert "lacks 3 batch(es)" in result.output
    assert "no replay 'v3'" in shop.swap("--replay", "v3").output
    assert shop.points_to() == [shop.old]


def test_only_an_alias_of_one_index_moves_and_only_to_an_index(shop: Shop) -> None:
    with shop.administration() as administration:
        with pytest.raises(UnsuitableTargetError, match="is an index itself"):
            administration.move_alias(shop.old, shop.new)
        with pytest.raises(UnsuitableTargetError, match="neither an index nor an alias"):
            administration.move_alias("nowhere", shop.new)
        for wrong in ("nowhere", shop.live):
            with pytest.raises(UnsuitableTargetError, match="not the name of an index"):
                administration.move_alias(shop.live, wrong)


def test_an_alias_that_another_client_moved_stays_where_it_is(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"{shop.new}-other"
    shop.ask("PUT", f"/{other}")
    actions = [{"remove": {"index": shop.old, "alias": shop.live}}, {"add": {"index": other, "alias": shop.live}}]
    ask = Administration.ask

    def moved_before_the_request(self: Administration, purpose: str, *arguments: Any, **options: Any) -> Any:
        answer = ask(self, purpose, *arguments, **options)
        if purpose.startswith("Moving") and shop.points_to() == [shop.old]:
            shop.ask("POST", "/_aliases", {"actions": actions})
        return answer

    monkeypatch.setattr(Administration, "ask", moved_before_the_request)
    try:
        with (
            shop.administration() as administration,
            pytest.raises(ElasticsearchRefusedError, match="aliases_not_found"),
        ):
            administration.move_alias(shop.live, shop.new)
        assert shop.points_to() == [other]
    finally:
        shop.ask("DELETE", f"/{other}")
