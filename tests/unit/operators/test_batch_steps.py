# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""allocate_blocks, checkpoint and cleanup, on a real ledger and log."""

from __future__ import annotations

import pytest

from headrace.batch import cleanup
from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import checkpoint_now
from headrace.clock import time_text
from headrace.hooks.ledger import register
from headrace.operators.batch_steps import (
    AllocateBlocksOperator,
    BatchNotCheckpointedError,
    CheckpointOperator,
    CleanupOperator,
)
from headrace.runs import batch_run
from headrace.stream import ConsoleOutput
from headrace.timetables.micro_batch import from_ms


def complete(ledger, at_ms):
    attempt = ledger.attempts.begin("flights", at_ms, holder="test", way="submit", lease_ms=10_000)
    for output in attempt.outputs:
        ledger.attempts.record_output(attempt, output, {})
    ledger.attempts.complete(attempt)


class TestAllocateBlocks:
    def test_the_runs_batch_gets_its_blocks_and_the_xcom_stays_small(self, allocated, ledger, stream):
        at_ms, task = allocated()
        batch = ledger.batches.get("flights", at_ms)
        assert batch.records == 3
        reported = AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
        assert reported == {
            "batch_time_ms": at_ms,
            "fresh": False,
            "blocks": 1,
            "records": 3,
            "absorbed": 0,
            "payload_bytes": batch.payload_bytes,
            "partitions": 1,
            "manifest_uri": batch.manifest_uri,
        }

    def test_an_empty_allocation_is_an_allocation(self, allocated, ledger):
        at_ms, _ = allocated(records=0)
        assert ledger.batches.get("flights", at_ms).records == 0

    def test_the_log_names_the_batch_by_its_time(self, allocated, stream, capsys):
        at_ms, task = allocated()
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
        out = capsys.readouterr().out
        assert f"Batch {time_text(at_ms)} was allocated before: 3 records in 1 blocks of 1 partitions, " in out
        assert str(at_ms) not in out.replace(f"{at_ms}.json", "")

    def test_the_first_task_to_know_a_stream_registers_it(self, stream, make_task):
        task = make_task(from_ms(1_700_000_000_000))
        reported = AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
        assert reported["records"] == 0

    def test_a_scheduled_run_allocates_earlier_times_with_records(self, allocated, source, ledger, until, monkeypatch):
        """They are those that have no batch yet."""
        missed = []
        for _ in range(3):
            missed.append(source.store(5))
            until(lambda: ledger.now_ms() >= missed[-1])
        monkeypatch.setattr(batch_run, "_MAX_MISSED", 2)
        assert allocated()[0] > missed[-1]
        assert [ledger.batches.get("flights", at_ms).records for at_ms in missed[:2]] == [5, 5]
        # The next run goes on.
        assert [time.batch_time_ms for time in ledger.blocks.unclaimed("flights")] == missed[2:]
        allocated()
        assert ledger.blocks.unclaimed("flights") == []

    @pytest.mark.parametrize("run_type", ["manual", "backfill"])
    def test_a_requested_run_only_names_earlier_times_without_batch(
        self, source, stream, ledger, make_task, until, caplog, run_type
    ):
        missed = source.store(5)
        until(lambda: ledger.now_ms() >= missed + 200)
        task = make_task(from_ms(missed), run_type=run_type)
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
        reported = caplog.text
        assert "hold 5 records" in reported
        assert "backfill" in reported
        assert ledger.batches.find("flights", missed) is None

    def test_in_order_earlier_times_are_left_to_the_wait_for_a_turn(self, source, stream, ledger, make_task, until):
        missed = source.store(5)
        until(lambda: ledger.now_ms() >= missed + 200)
        task = make_task(from_ms(missed))
        ordered = stream.model_copy(update={"ordered": True})
        AllocateBlocksOperator(task_id="allocate", stream=ordered).execute(task.context)
        assert ledger.batches.find("flights", missed) is None

    def test_a_time_from_before_the_stream_is_built_on_request(self, stream, ledger, make_task, monkeypatch, until):
        built = []

        def build(context, at_ms):
            built.append(at_ms)
            return allocate(context, at_ms)

        monkeypatch.setattr("headrace.batch.build_from_kafka.build_from_kafka", build)
        early, late = 1_700_000_000_000, ledger.streams.get("flights").zero_time_ms + stream.batch_interval_ms
        until(lambda: ledger.now_ms() >= late)
        for at_ms in (early, late):
            for conf in ({}, {"from_kafka": True}):
                task = make_task(from_ms(at_ms - stream.batch_interval_ms), conf)
                AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
        assert built == [early]

    def test_a_run_without_logical_date_has_one_batch_in_all_tasks(self, stream, source, ledger, make_task, until):
        at_ms = source.store(4)
        until(lambda: ledger.now_ms() >= at_ms)
        task = make_task(None, run_id="asset_triggered__1")
        reported = AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
        assert (reported["batch_time_ms"], reported["records"]) == (at_ms, 4)
        complete(ledger, at_ms)
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        assert ledger.batches.get("flights", at_ms).checkpoint_uri


class TestCheckpoint:
    def test_a_completed_batch_is_checkpointed(self, allocated, ledger, stream):
        at_ms, task = allocated()
        complete(ledger, at_ms)
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        assert ledger.batches.get("flights", at_ms).checkpoint_uri

    def test_after_a_failed_batch_the_state_is_kept_as_well(self, allocated, ledger, stream, capsys):
        at_ms, task = allocated()
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        assert ledger.batches.get("flights", at_ms).checkpointed_at_ms is None
        assert "Checkpoint " in capsys.readouterr().out

    def test_steps_left_of_a_batch_are_named_unless_under_attempt(self, allocated, ledger, stream, capsys):
        at_ms, task = allocated()
        more = (*stream.outputs, ConsoleOutput(id="one"), ConsoleOutput(id="two"))
        stream = stream.model_copy(update={"outputs": more})
        register(ledger, stream)
        begun = {"holder": "test", "way": "submit", "lease_ms": 60_000}
        for output in ("elasticsearch", "one"):
            attempt = ledger.attempts.begin("flights", at_ms, outputs=[output], **begun)
            if output == "elasticsearch":
                ledger.attempts.record_output(attempt, output, {})
                ledger.attempts.complete(attempt)
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        assert f"Batch {time_text(at_ms)} is not complete, one step is left to do: two." in capsys.readouterr().out
        ledger.attempts.fail(attempt, "no")
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        assert "2 steps are left to do: one, two." in capsys.readouterr().out
        complete(ledger, at_ms)
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        assert "left to do" not in capsys.readouterr().out

    def test_a_batch_that_was_never_allocated_has_nothing(self, stream, ledger, make_task):
        task = make_task(from_ms(1_700_000_000_000))
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        CleanupOperator(task_id="cleanup", stream=stream).execute(task.context)


class TestCleanup:
    def test_a_completed_batch_without_its_result_fails_the_run(self, allocated, ledger, stream):
        at_ms, task = allocated()
        complete(ledger, at_ms)
        with pytest.raises(BatchNotCheckpointedError, match="has no result file"):
            CleanupOperator(task_id="cleanup", stream=stream).execute(task.context)

    def test_a_later_batchs_checkpoint_during_the_cleanup_counts(self, allocated, ledger, stream, monkeypatch):
        at_ms, task = allocated()
        complete(ledger, at_ms)
        clean_up = cleanup.clean_up

        def while_another_checkpoints(context):
            checkpoint_now(context, at_ms + 10_000)
            return clean_up(context)

        monkeypatch.setattr(cleanup, "clean_up", while_another_checkpoints)
        CleanupOperator(task_id="cleanup", stream=stream).execute(task.context)

    def test_a_failed_batch_has_failed_already(self, allocated, stream):
        _, task = allocated()
        CleanupOperator(task_id="cleanup", stream=stream).execute(task.context)

    def test_a_cleanup_removes_what_is_done_and_logs_it_in_words(
        self, allocated, ledger, stream, source, until, capsys
    ):
        at_ms, task = allocated()
        complete(ledger, at_ms)
        CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
        ledger.receivers.release(source.lease)
        until(lambda: ledger.now_ms() > at_ms + stream.remember_ms)
        CleanupOperator(task_id="cleanup", stream=stream).execute(task.context)
        assert ledger.batches.get("flights", at_ms).cleaned_at_ms
        assert ledger.allocations.blocks_of("flights", at_ms) == []
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "Cleanup after batch" in line]
        assert f"Cleanup after batch {time_text(at_ms)}: " in line
        assert "1 blocks folded into their batches, 1 batches with nothing left in the log" in line
