"""The route of the metrics: who gets which streams, in which format.

The page's files: what index.html names exists, and every module is loaded ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.support.page_server import NoAirflow

from headrace.ledger import Ledger
from headrace.ui.api.app import PAGE, create_app, is_scraper
from headrace.views.streams import Placed

TOKEN = "0123456789abcdef0123456789abcdef"
INTERVALS = {"batch_interval_ms": 1_000, "block_interval_ms": 200}


@pytest.fixture
def airflow(tmp_path: Path) -> NoAirflow:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    with Ledger.open(urls[0]) as ledger:
        for name in ("flights", "clicks"):
            ledger.streams.register(
                name, '{"outputs": [{"id": "index"}], "limits": {"max_log_bytes": 99}}', **INTERVALS
            )
    with Ledger.open(urls[1]) as ledger:
        ledger.streams.register("flights", '{"outputs": []}', **INTERVALS)
        ledger.streams.register("orders", '{"outputs": []}', **INTERVALS)
    return NoAirflow(
        ledger_urls=[*urls, f"sqlite:///{tmp_path}/missing.db", "postgresql+psycopg://someone:secret@host/db"],
        streams=[Placed("clicks", urls[0], "clicks_in_batches", "clicks_receiver")],
        token=TOKEN,
    )


@pytest.fixture
def get(airflow: NoAirflow) -> Callable[..., tuple[int, str, str]]:
    client = TestClient(create_app(airflow))

    def get(user: str = "anonymous", **headers: str) -> tuple[int, str, str]:
        answer = client.get("/metrics", headers={"X-User": user, **headers})
        return answer.status_code, answer.text, answer.headers["content-type"]

    return get


def streams_in(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if line.startswith("headrace_stream_running")]
    assert len(lines) == len(set(lines)), "a sample may appear only once"
    return {line.split('"')[1] for line in lines}


def test_without_a_login_and_without_the_token_nothing_is_shown(get: Callable[..., tuple[int, str, str]]) -> None:
    assert get()[0] == 401
    assert get(Authorization="Bearer wrong")[0] == 401
    assert get(Authorization=f"Basic {TOKEN}")[0] == 401


def test_a_scraper_gets_the_streams_of_all_ledgers(get: Callable[..., tuple[int, str, str]]) -> None:
    status, text, content_type = get(Authorization=f"Bearer {TOKEN}")
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert streams_in(text) == {"flights", "clicks", "orders"}
    assert 'headrace_log_limit_bytes{stream="flights"} 99.0' in text


def test_a_silent_ledger_is_named_and_a_password_is_not(get: Callable[..., tuple[int, str, str]]) -> None:
    text = get(Authorization=f"Bearer {TOKEN}")[1]
    down = [line for line in text.splitlines() if line.startswith("headrace_ledger_up") and line.endswith(" 0.0")]
    assert [line for line in down if "missing.db" in line]
    assert len(down) == 2
    assert "secret" not in text


def test_a_user_learns_nothing_of_ledgers_without_a_right(
    airflow: NoAirflow, get: Callable[..., tuple[int, str, str]]
) -> None:
    """The right is that to read any stream of it."""
    airflow.hidden = {"clicks_in_batches", "flights_batches"}
    ledgers = {line.split('"')[1] for line in get("viewer")[1].splitlines() if line.startswith("headrace_ledger_up")}
    assert [ledger.rpartition("/")[2] for ledger in ledgers] == ["two.db"]


def test_no_login_of_a_ledger_is_in_a_label(airflow: NoAirflow, get: Callable[..., tuple[int, str, str]]) -> None:
    airflow.ledger_urls = ["postgresql+psycopg://someone@127.0.0.1:1/db?connect_timeout=2"]
    text = get(Authorization=f"Bearer {TOKEN}")[1]
    assert 'headrace_ledger_up{ledger="postgresql+psycopg://127.0.0.1:1/db"} 0.0' in text
    assert "someone" not in text


def test_ledgers_that_differ_by_their_logins_have_own_labels(
    airflow: NoAirflow, get: Callable[..., tuple[int, str, str]]
) -> None:
    """Prometheus refuses a whole scrape in which two samples have the same labels."""
    airflow.ledger_urls = [f"postgresql+psycopg://{user}@127.0.0.1:1/db" for user in ("one", "two")]
    text = get(Authorization=f"Bearer {TOKEN}")[1]
    up = [line for line in text.splitlines() if line.startswith("headrace_ledger_up") and "127.0.0.1" in line]
    assert len(up) == len(set(up)) == 2


def test_a_user_gets_the_streams_whose_batch_dag_they_may_read(
    airflow: NoAirflow, get: Callable[..., tuple[int, str, str]]
) -> None:
    airflow.hidden = {"clicks_in_batches", "orders_batches"}
    status, text, _ = get(user="viewer")
    assert status == 200
    assert streams_in(text) == {"flights"}
    assert "clicks" not in text


def test_two_streams_of_one_name_each_need_their_own_dags_right(
    airflow: NoAirflow, get: Callable[..., tuple[int, str, str]]
) -> None:
    first, second, *_ = airflow.ledger_urls
    airflow.streams = [
        Placed("flights", first, "first_batches", "r"),
        Placed("flights", second, "second_batches", "r"),
    ]
    airflow.hidden = {"first_batches"}
    # The first ledger's stream has a limit of its log.
    assert "flights" in streams_in(get(user="viewer")[1])
    assert 'headrace_log_limit_bytes{stream="flights"}' not in get(user="viewer")[1]
    airflow.hidden = {"second_batches"}
    assert 'headrace_log_limit_bytes{stream="flights"} 99.0' in get(user="viewer")[1]


def test_a_moved_stream_is_measured_in_its_declared_ledger(
    airflow: NoAirflow, get: Callable[..., tuple[int, str, str]]
) -> None:
    """The declared ledger is the one that its DAGs name."""
    _, second, *_ = airflow.ledger_urls
    airflow.streams.append(Placed("flights", second, "flights_batches", "flights_receiver"))
    text = get(Authorization=f"Bearer {TOKEN}")[1]
    assert streams_in(text) == {"flights", "clicks", "orders"}
    # Only the row that it left in the first ledger has a limit of its log.
    assert 'headrace_log_limit_bytes{stream="flights"}' not in text


def test_openmetrics_is_given_if_it_is_asked_for(get: Callable[..., tuple[int, str, str]]) -> None:
    _, text, content_type = get(user="viewer", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_without_a_configured_token_no_token_is_right() -> None:
    assert not is_scraper("Bearer ", "")
    assert not is_scraper("Bearer x", "")
    assert not is_scraper(None, TOKEN)
    assert not is_scraper("Bearer ü", TOKEN)
    assert is_scraper(f"bearer {TOKEN}", TOKEN)


INDEX = (PAGE / "index.html").read_text()
# uPlot is a classic script, and main.js starts the others.
MODULES = {
    file.relative_to(PAGE).as_posix()
    for file in (PAGE / "static").rglob("*.js")
    if file.name not in ("uPlot.iife.min.js", "main.js")
}


@pytest.fixture
def page_policy() -> dict[str, str]:
    """The directives of the Content-Security-Policy with which the page is served."""
    app = create_app(NoAirflow())
    header = TestClient(app).get("/").headers["content-security-policy"]
    app.state.ledgers.close()
    return {name: value for name, _, value in (directive.strip().partition(" ") for directive in header.split(";"))}


def test_every_module_is_preloaded_in_one_round_of_requests() -> None:
    assert set(re.findall(r'rel="modulepreload" href="([^"]+)"', INDEX)) == MODULES


def test_each_file_that_the_page_names_exists_and_is_its_own() -> None:
    named = re.findall(r'(?:href|src)="([^"]+)"', INDEX)
    assert [name for name in named if not (PAGE / name).is_file()] == []


def test_each_import_of_a_module_is_a_file_of_the_page() -> None:
    missing = []
    for module in sorted(MODULES | {"static/main.js"}):
        file = PAGE / module
        for name in re.findall(r'"(\.{1,2}/[^"]+\.js)"', file.read_text()):
            if not (file.parent / name).resolve().is_file():
                missing.append((module, name))
    assert missing == []


def test_the_pages_policy_refuses_inline_scripts_and_styles(page_policy: dict[str, str]) -> None:
    assert page_policy["default-src"] == "'self'"
    assert page_policy["style-src"] == "'self'"
    assert "script-src" not in page_policy
    # So the page has none.
    assert re.findall(r"<style|\sstyle=|<script>|\son[a-z]+=", INDEX) == []


def test_each_library_has_its_licence() -> None:
    vendor = PAGE / "static" / "vendor"
    folders = [folder for folder in vendor.iterdir() if folder.is_dir()]
    assert len(folders) == 3
    assert [folder.name for folder in folders if not (folder / "LICENSE").is_file()] == []
