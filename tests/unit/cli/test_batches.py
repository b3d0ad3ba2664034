"""`headrace batches list` and the other verbs: the list, what nobody has taken, and what is given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.cli.main import app
from headrace.clock import SystemClock, time_text
from headrace.ledger import BatchState, Ledger

PARTITION = TopicPartition("clicks", "id-1", 0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A ledger with blocks of three batch times, of which the first has a batch."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger.open(url) as ledger:
        ledger.streams.register("shop", '{"outputs": [{"id": "a"}]}', batch_interval_ms=1_000, block_interval_ms=200)
        job = ledger.jobs.acquire("shop", holder="driver", lease_ms=60_000)
        ledger.topics.observe(job, "kafka", [("clicks", "id-1", 1)])
        ledger.positions.ensure_all(job, "kafka", {PARTITION: 0})
        ledger.positions.assign(job, "kafka", {PARTITION: 0})
        lease = ledger.receivers.register(
            ledger.receivers.schedule(job, ReceiverId("shop", "kafka", 0)), host="here", lease_ms=60_000
        )
        first_ms = ledger.now_ms() // 1_000 * 1_000 - 10_000
        for number in range(3):
            ledger.blocks.add(
                lease,
                BlockInfo(
                    lease.receiver_id, lease.epoch, number, first_ms + 1_000 * number, BlockHandle("a", number * 9, 9),
                    (OffsetRange(PARTITION, number * 5, number * 5 + 5, 5),), records=5, payload_bytes=50,
                ),
            )  # fmt: skip
        ledger.allocations.allocate("shop", first_ms + 1_000, manifest_uri="m", manifest_sha256="0", blocks_expected=1)
    return url


@pytest.fixture
def run(url: str) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["batches", *arguments, "--ledger", url])

    return run


def test_batches_are_listed_with_what_no_batch_has_taken(run: Callable[..., Result]) -> None:
    reported: Any = json.loads(run("list", "shop", "--json").stdout)
    assert [(batch["records"], batch["state"]) for batch in reported["batches"]] == [(5, "allocated")]
    assert [time["records"] for time in reported["unclaimed"]] == [5, 5]
    text = run("list", "shop").stdout
    assert "The next runs of the batch DAG take them" in text
    assert "allocated" in text
    assert "And later ones" not in text


def test_a_long_backlog_does_not_hide_the_list_of_batches(run: Callable[..., Result]) -> None:
    text = run("list", "shop", "--limit", "1").stdout
    batch, time = [line for line in text.splitlines() if "Z" in line]
    assert "allocated" in batch
    assert time.split()[-1] == "5"
    assert "And later ones: `headrace batches unclaimed shop` lists them." in text


def test_times_that_a_batch_took_over_are_folded_into_it(run: Callable[..., Result], url: str) -> None:
    with Ledger.open(url) as ledger:
        last_ms, *earlier = [time.batch_time_ms for time in ledger.blocks.unclaimed("shop")][::-1]
        ledger.allocations.allocate(
            "shop", last_ms, manifest_uri="m", manifest_sha256="0", blocks_expected=2, absorb=earlier
        )
        (absorbed_ms,) = earlier
    first, second = [line for line in run("list", "shop").stdout.splitlines() if "allocated" in line]
    assert f"1 from {time_text(absorbed_ms)}" in first
    assert "from" not in second
    every = run("list", "shop", "--all").stdout
    (line,) = [line for line in every.splitlines() if line.split()[:1] == [time_text(absorbed_ms)]]
    assert "absorbed" in line
    assert f"by {time_text(last_ms)}" in line


def test_a_backlog_without_runs_is_distinguished_from_one_that_runs_will_take(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "backfill" not in run("unclaimed", "shop").stdout
    now_ms = SystemClock().now_ms() + 90_000
    monkeypatch.setattr(Ledger, "now_ms", lambda _: now_ms)
    reported = run("unclaimed", "shop").stdout
    assert "No batch was allocated since" in reported
    assert "wait or fail before they allocate one" in reported


def test_batch_times_ahead_of_a_clock_that_was_corrected_are_unclaimed_too(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = SystemClock().now_ms() - 600_000
    monkeypatch.setattr(Ledger, "now_ms", lambda _: now_ms)
    assert len(json.loads(run("unclaimed", "shop", "--json").stdout)) == 2
    assert "Some are still to come" in run("unclaimed", "shop").stdout


def test_the_error_of_a_batch_whose_output_failed_is_listed(run: Callable[..., Result], url: str) -> None:
    with Ledger.open(url) as ledger:
        (batch,) = ledger.batches.page("shop")
        begin = {"holder": "test", "way": "connect", "lease_ms": 60_000}
        attempt = ledger.attempts.begin("shop", batch.batch_time_ms, **begin)  # type: ignore[arg-type]
        ledger.attempts.fail(attempt, "the index is read-only")
        ledger.attempts.begin("shop", batch.batch_time_ms, **begin)  # type: ignore[arg-type]
    (reported,) = json.loads(run("list", "shop", "--json").stdout)["batches"]
    assert (reported["state"], reported["error"]) == ("running", "the index is read-only")
    assert "the index is read-only" in run("list", "shop").stdout


def test_unclaimed_batch_times_are_listed_by_themselves(run: Callable[..., Result], url: str) -> None:
    reported: Any = json.loads(run("unclaimed", "shop", "--json").stdout)
    assert [(time["blocks"], time["records"]) for time in reported] == [(1, 5), (1, 5)]
    assert len(json.loads(run("unclaimed", "shop", "--limit", "1", "--json").stdout)) == 1
    with Ledger.open(url) as ledger:
        for time in reported:
            ledger.allocations.allocate(
                "shop", time["batch_time_ms"], manifest_uri="m", manifest_sha256="0", blocks_expected=1
            )
    assert "Every batch time" in run("unclaimed", "shop").stdout


def test_a_batch_is_given_up_with_a_reason_as_a_gap(run: Callable[..., Result], url: str) -> None:
    with Ledger.open(url) as ledger:
        (batch,) = ledger.batches.page("shop")
    time = str(batch.batch_time_ms)
    assert run("abandon", "shop", time).exit_code == 2, "it needs a reason"
    assert run("abandon", "shop", time, "--reason", " ").exit_code == 2
    result = run("abandon", "shop", time, "--reason", "poison")
    assert "5 records are now a gap" in result.stdout
    with Ledger.open(url) as ledger:
        assert ledger.batches.get("shop", batch.batch_time_ms).state is BatchState.ABANDONED
        (gap,) = ledger.gaps.page("shop")
    assert (gap.from_offset, gap.until_offset, gap.reason) == (0, 5, "batch abandoned: poison")
    assert run("abandon", "shop", time, "--reason", "again").exit_code == 0


def test_one_output_of_a_batch_is_given_up(run: Callable[..., Result], url: str) -> None:
    with Ledger.open(url) as ledger:
        (batch,) = ledger.batches.page("shop")
        (step,) = ledger.streams.get("shop").outputs
        definition = json.dumps({"outputs": [{"id": "search", "renamed_from": step}, {"id": "files"}]})
        ledger.streams.register("shop", definition, batch_interval_ms=batch.interval_ms, block_interval_ms=200)
    give_up = ("abandon", "shop", str(batch.batch_time_ms), "--reason", "its disk is gone", "--output")
    assert run(*give_up, "nosuch").exit_code == 1
    # By its present id.
    result = run(*give_up, "search")
    assert "Output search of batch" in result.stdout
    assert "is given up: its 5 records are not written there. The batch is allocated." in result.stdout
    assert "was given up, and lacks its records: its disk is gone" in run("show", *give_up[1:3]).stdout


def test_what_is_not_there_is_an_error(run: Callable[..., Result]) -> None:
    assert run("unclaimed", "nosuch").exit_code == 1
    assert run("abandon", "shop", "1000", "--reason", "x").exit_code == 1
    assert run("show", "shop", "soon").exit_code == 2


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_batch_before_the_stream_began_is_an_error_with_that_time(
    run: Callable[..., Result], url: str, form: list[str]
) -> None:
    with Ledger.open(url) as ledger:
        zero_ms = ledger.streams.get("shop").zero_time_ms
    result = run("show", "shop", str(zero_ms - 60_000), *form)
    assert result.exit_code == 1
    assert f"began at {time_text(zero_ms)}" in " ".join(result.stderr.split())
    assert f"Its first batch is {time_text(zero_ms + 1_000)}" in " ".join(result.stderr.split())
    assert run("show", "shop", str(zero_ms + 60_000), *form).exit_code == 0


def test_export_refuses_a_folder_before_anything_is_read(tmp_path: Path) -> None:
    arguments = ["batches", "export", "orders", "2026-11-21T14:05Z", "--to", str(tmp_path), "--ledger", "sqlite://"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "directory" in result.stderr
