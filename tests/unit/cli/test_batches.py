"""`headrace batches list` and the other verbs, told from a real ledger, and how `headrace batches run` finds Airflow.

tests/system/test_stream.py runs a batch again with `headrace batches run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.batch.allocation import allocate
from headrace.batch.places import READERS
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.cli.main import app
from headrace.clock import SystemClock, time_text
from headrace.errors import INTERRUPTED
from headrace.hooks.ledger import register
from headrace.ledger import BatchState, Ledger
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

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


def test_a_backlog_without_runs_differs_from_one_runs_will_take(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "backfill" not in run("unclaimed", "shop").stdout
    now_ms = SystemClock().now_ms() + 90_000
    monkeypatch.setattr(Ledger, "now_ms", lambda _: now_ms)
    reported = run("unclaimed", "shop").stdout
    assert "No batch was allocated since" in reported
    assert "wait or fail before they allocate one" in reported


def test_times_ahead_of_a_corrected_clock_are_unclaimed_too(
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


def test_the_next_try_of_a_batch_is_listed_and_shown(run: Callable[..., Result], url: str) -> None:
    with Ledger.open(url) as ledger:
        (batch,) = ledger.batches.page("shop")
        attempt = ledger.attempts.begin("shop", batch.batch_time_ms, holder="t", way="connect", lease_ms=1_000)
        ledger.attempts.renew(attempt, attributes={INTERRUPTED: True})
        ledger.attempts.fail(attempt, "its process was killed by signal 9")
    (listed,) = json.loads(run("list", "shop", "--json").stdout)["batches"]
    assert (listed["tried_again"], listed["next_try_ms"] is not None) == ("now", True)
    shown = run("show", "shop", time_text(batch.batch_time_ms)).stdout
    assert "The repair tries it again now." in shown


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
def test_a_batch_before_the_streams_beginning_is_an_error(
    run: Callable[..., Result], url: str, form: list[str]
) -> None:
    """The error names the time at which the stream began."""
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


INTERVAL_MS = 10_000


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=[ConsoleOutput(), ConsoleOutput(id="second")],
        batch_interval="10 s",
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


@pytest.fixture
def batch_time_ms(stream: Stream) -> int:
    """A batch whose one output succeeded, whose other failed, and which was replayed."""
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        time_ms = ledger.now_ms() // INTERVAL_MS * INTERVAL_MS
        allocate(StreamContext(stream, ledger), time_ms)
        claim: dict[str, Any] = {"way": "connect", "lease_ms": 60_000}
        first = ledger.attempts.begin("shop", time_ms, holder="one", outputs=["console"], **claim)
        reader = {"registry": "schemas", "subject": "shop-value", "version": 2, "sha256": "00"}
        facts = {"clicks.value_decoder of schemas/shop-value": reader}
        ledger.attempts.record_output(first, "console", {"printed": 7, "seconds": 3.0207860220000384, READERS: facts})
        ledger.attempts.complete(first, code_version="shop:show 3f9c2a10")
        second = ledger.attempts.begin("shop", time_ms, holder="two", outputs=["second"], **claim)
        ledger.attempts.fail(second, "the paper is out")
        replay = ledger.replays.begin(
            "shop", time_ms, target="v2", definition=stream.to_json(), outputs=["console"], holder="three", **claim
        )
        ledger.attempts.record_output(replay, "console", {"printed": 8})
        ledger.attempts.complete(replay)
    return time_ms


def shown(stream: Stream, batch_time_ms: int, *options: str) -> str:
    command = ["batches", "show", "shop", str(batch_time_ms)]
    result = CliRunner().invoke(app, [*command, "--ledger", stream.ledger, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_people_read_what_became_of_each_output_and_attempt(stream: Stream, batch_time_ms: int) -> None:
    text = shown(stream, batch_time_ms)
    assert "failed. It holds 0 records in 0 blocks." in text
    assert "it is read from the log" in text
    lines = text.splitlines()
    (console,) = [line for line in lines if line.strip().startswith("console")]
    assert "completed" in console
    assert "printed 7, seconds 3.0 " in console
    assert (
        "clicks.value_decoder reads by version 2 of subject shop-value, with the registry of connection schemas."
        in text
    )
    assert "shop:show 3f9c2a10" in console
    (failed,) = [line for line in lines if line.strip().startswith("second")]
    assert "the paper is out" in failed
    (replayed,) = [line for line in lines if " v2 " in line]
    assert "three" in replayed


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"throttled_requests": 1_205, "throttled_seconds": 12.4}, "12 s by the server (requests with 429: 1,205)."),
        ({"ceiling_seconds": 90.0, "retries": 4}, "1 min 30 s by its ceiling."),
        (
            {"throttled_requests": 1, "ceiling_seconds": 0.5, "slow_requests": 3},
            "0.0 s by the server (requests with 429: 1), 0.5 s by its ceiling, by slow answers (3).",
        ),
        ({"retries": 4, "throttled_requests": "of a user's function"}, None),
    ],
)
def test_an_output_that_was_throttled_says_by_what(
    stream: Stream, batch_time_ms: int, counts: dict[str, Any], text: str | None
) -> None:
    with Ledger.open(stream.ledger) as ledger:
        again = ledger.attempts.begin(
            "shop", batch_time_ms, holder="again", outputs=["second"], way="connect", lease_ms=60_000
        )
        ledger.attempts.record_output(again, "second", counts)
        ledger.attempts.complete(again)
    said = [
        line for line in shown(stream, batch_time_ms).splitlines() if line.startswith("Output second was throttled")
    ]
    assert said == ([] if text is None else [f"Output second was throttled {text}"])


def test_the_run_that_completed_what_another_one_failed_is_named(stream: Stream, batch_time_ms: int) -> None:
    assert "completed the batch at" not in shown(stream, batch_time_ms)
    with Ledger.open(stream.ledger) as ledger:
        claim: dict[str, Any] = {"way": "connect", "lease_ms": 60_000, "attributes": {"run_id": "scheduled__5"}}
        last = ledger.attempts.begin("shop", batch_time_ms, holder="later", **claim)
        ledger.attempts.record_output(last, "second", {})
        ledger.attempts.complete(last)
        ended_ms = ledger.attempts.of_batch("shop", batch_time_ms)[-1].ended_at_ms
    text = shown(stream, batch_time_ms)
    assert "The run two failed at" in text
    assert f"The run scheduled__5 completed the batch at {time_text(ended_ms)}." in text


def test_scripts_read_the_same(stream: Stream, batch_time_ms: int) -> None:
    reported = json.loads(shown(stream, batch_time_ms, "--json"))
    assert reported["origin"]["source"] == "log"
    assert [(output["output_id"], output["state"]) for output in reported["outputs"]] == [
        ("console", "completed"),
        ("second", "failed"),
    ]
    assert [attempt["target"] for attempt in reported["attempts"]] == ["", "", "v2"]


def test_each_outputs_definition_and_index_and_attempt_are_shown(stream: Stream, batch_time_ms: int) -> None:
    reported = json.loads(shown(stream, batch_time_ms, "--json"))
    assert [output["revision"] for output in reported["outputs"]] == [1, 1]
    assert [attempt["revision"] for attempt in reported["attempts"]] == [1, 1, None]
    assert "different definitions" not in shown(stream, batch_time_ms)
    with Ledger.open(stream.ledger) as ledger:
        revision = register(ledger, stream.model_copy(update={"parameters": {"deployed": "again"}}))
        claim: dict[str, Any] = {"way": "connect", "lease_ms": 60_000, "holder": "four", "revision": revision}
        again = ledger.attempts.begin("shop", batch_time_ms, outputs=["second"], **claim)
        ledger.attempts.record_output(again, "second", {"indexed": 7, "index": "orders-2026-11"})
        ledger.attempts.complete(again)
        register(ledger, stream)
    text = shown(stream, batch_time_ms)
    assert "The outputs of this batch were written under different definitions of the stream: 1, 2." in text
    (second,) = [line for line in text.splitlines() if line.strip().startswith("second")]
    assert second.split() == ["second", "completed", "4", "2", "orders-2026-11", "indexed", "7", "-", "-"]
    assert [output["revision"] for output in json.loads(shown(stream, batch_time_ms, "--json"))["outputs"]] == [1, 2]


def test_what_a_batch_took_over_is_shown_on_both_sides(stream: Stream) -> None:
    coalescing = stream.model_copy(update={"name": "shop", "coalesce": True})
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, coalescing)
        last_ms = ledger.now_ms() // INTERVAL_MS * INTERVAL_MS
        first_ms = last_ms - INTERVAL_MS
        ledger.allocations.allocate(
            "shop", last_ms, manifest_uri="m", manifest_sha256="0", blocks_expected=0, absorb=[first_ms]
        )
    assert "It took over the blocks of 1 earlier batch time(s) that no run had taken" in shown(stream, last_ms)
    assert "took its blocks over." in shown(stream, first_ms)


def test_a_time_that_is_not_allocated_is_shown_too(stream: Stream, batch_time_ms: int) -> None:
    later_ms = batch_time_ms + INTERVAL_MS
    assert "is not allocated yet; the log holds nothing for it" in shown(stream, later_ms)
    assert json.loads(shown(stream, later_ms, "--json")) == {"batch": None, "waiting": None}


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_time_that_is_no_batch_time_is_refused(stream: Stream, batch_time_ms: int, option: str) -> None:
    command = ["batches", "show", "shop", str(batch_time_ms + 1), "--ledger", stream.ledger, *filter(None, [option])]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "BATCH_TIME" in result.output
    assert f"the one before it is {time_text(batch_time_ms)}" in " ".join(result.output.replace("│", "").split())


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
