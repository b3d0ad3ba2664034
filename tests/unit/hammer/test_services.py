"""The service manager: what has ended is started again, what is being hit is left alone."""

from __future__ import annotations

import pytest
from tests.hammer import services as module
from tests.hammer.journal import Journal
from tests.hammer.services import Services, answers
from tests.unit.hammer.conftest import Sleeper, wait_until


@pytest.fixture
def services(server: Sleeper, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Services:
    """With hardly any retry_budget."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.1)
    return Services({server.name: server}, journal)


def test_a_server_that_has_ended_is_started_again_and_counted(
    services: Services, server: Sleeper, journal: Journal
) -> None:
    before = server.process.pid
    with services:
        server.kill()
        wait_until(lambda: server.alive and server.process.pid != before)
        assert answers(server, 30)
    assert journal.collateral == {"kafka": 1}


def test_a_server_that_is_being_hit_is_left_alone(services: Services, server: Sleeper, journal: Journal) -> None:
    with services:
        with services.held("kafka"):
            server.kill()
            assert not services._stop.wait(0.5)
            assert not server.alive
            assert journal.collateral == {}
        wait_until(lambda: server.alive)
    assert journal.collateral == {"kafka": 1}


def test_servers_of_a_kind_are_found_by_its_name(server: Sleeper, journal: Journal) -> None:
    services = Services({"spark-worker-0": server, "spark-worker-1": server, "kafka": server}, journal)
    assert services.named("spark-worker") == ["spark-worker-0", "spark-worker-1"]
    assert services.named("kafka") == ["kafka"]


def test_a_server_that_does_not_answer_is_named(services: Services, server: Sleeper) -> None:
    assert services.await_all(30) == []
    server.ready.unlink()
    assert services.await_all(0.1) == ["kafka"]
