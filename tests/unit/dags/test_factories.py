from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from airflow.sdk import AssetOrTimeSchedule, RetryAction
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.base import TimeRestriction

from headrace.batch.build_from_kafka import BatchBuildError
from headrace.batch.manifest import ManifestError
from headrace.dags import batch_dag, receiver_dag, replay_dag, stream_dags
from headrace.ledger.errors import LedgerUnavailableError
from headrace.stream import (
    BatchTrigger,
    ConsoleOutput,
    ElasticsearchOutput,
    KafkaInput,
    Limits,
    State,
    Stream,
    StreamDefinitionError,
)
from headrace.timetables.batch_time import NoBatchTimeError
from headrace.timetables.micro_batch import MicroBatchTimetable

STEPS = ["await_blocks", "allocate_blocks", "generate_batch", "checkpoint", "cleanup"]


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(connection="kafka_flights", topics="flights", receivers=1),
        outputs=(
            ElasticsearchOutput(hosts="http://localhost:9200", index="flights"),
            ConsoleOutput(),
        ),
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        limits=Limits(max_concurrent_batches=2),
    )


def served(dag):
    """The DAG as Airflow's server and scheduler know it."""
    return DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))


class TestBatchDag:
    def test_the_five_steps_follow_each_other(self, stream):
        dag = batch_dag(stream)
        assert [task.task_id for task in dag.topological_sort()] == STEPS
        for before, after in pairwise(STEPS):
            assert dag.get_task(before).downstream_task_ids == {after}

    def test_each_output_is_an_instance_of_one_task(self, stream):
        generate = batch_dag(stream).get_task("generate_batch")
        assert generate.expand_input.value == {"step": ["elasticsearch", "console"]}
        assert generate.partial_kwargs["map_index_template"] == "{{ task.step }}"
        unmapped = generate.unmap({"step": "console"})
        assert (unmapped.step, unmapped.stream) == ("console", stream)

    def test_state_is_updated_before_the_outputs(self, stream):
        stateful = stream.model_copy(update={"state": State(update="m:f", fields="k STRING", keys="k")})
        dag = batch_dag(stateful)
        assert dag.get_task("update_state").step == "state"
        assert dag.get_task("update_state").upstream_task_ids == {"allocate_blocks"}
        assert dag.get_task("generate_batch").upstream_task_ids == {"update_state"}

    def test_a_task_is_tried_again_once_and_soon_so_that_its_run_fails_in_time(self, stream):
        for task in batch_dag(stream).tasks:
            assert task.retries == 1
            assert task.retry_delay == timedelta(seconds=5)
            decide = partial(task.retry_policy.evaluate, try_number=1, max_tries=1)
            for final in (ManifestError("damaged"), BatchBuildError("is its own"), NoBatchTimeError("no date")):
                assert decide(final).action is RetryAction.FAIL
            for seconds, action in ((5, RetryAction.DEFAULT), (31, RetryAction.FAIL)):
                started = datetime.now(UTC) - timedelta(seconds=seconds)
                context = {"ti": SimpleNamespace(start_date=started)}
                assert decide(LedgerUnavailableError("away"), context=context).action is action
            assert decide(RuntimeError("anything")).action is RetryAction.DEFAULT
        assert batch_dag(stream, default_args={"retries": 3}).get_task("generate_batch").retries == 3

    def test_one_task_does_it_all_if_wished(self, stream):
        dag = batch_dag(stream, single_task=True)
        assert dag.task_ids == ["micro_batch"]
        assert dag.get_task("micro_batch").step is None

    def test_a_stream_that_coalesces_runs_the_latest_interval_alone(self, stream):
        def catch_up(**fields):
            return batch_dag(stream.model_copy(update=fields)).timetable.catch_up

        assert catch_up() is False
        assert catch_up(coalesce=False) is True

    def test_a_trigger_takes_the_clocks_place(self, stream):
        triggered = stream.model_copy(update={"trigger": BatchTrigger(min_records=100, max_delay="5 s")})
        dag = batch_dag(triggered)
        assert isinstance(dag.timetable, AssetOrTimeSchedule)
        assert dag.max_active_runs == 1
        assert "100 records" in dag.description

    def test_a_failed_batch_fails_the_run_though_checkpoint_and_cleanup_run(self, stream):
        from airflow.models.dagrun import DagRun

        dag = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(batch_dag(stream)))

        class Instance:
            state = None

            def __init__(self, task_id):
                self.task_id = task_id

        leaves = DagRun._tis_for_dagrun_state(DagRun(), dag=dag, tis=[Instance(task_id) for task_id in STEPS])
        assert {leaf.task_id for leaf in leaves} == {"generate_batch", "cleanup"}
        for step in ("checkpoint", "cleanup"):
            assert dag.get_task(step).is_teardown
            assert dag.get_task(step).trigger_rule == "all_done_setup_success"

    def test_runs_are_those_of_the_timetable_from_now_on(self, stream):
        dag = batch_dag(stream)
        assert dag.timetable == MicroBatchTimetable(timedelta(seconds=10))
        assert dag.catchup is False
        info = dag.timetable.next_dagrun_info(
            last_automated_data_interval=None, restriction=TimeRestriction(dag.start_date, None, catchup=dag.catchup)
        )
        # The latest interval that has ended: the run takes over what came before.
        assert timedelta(0) <= datetime.now(UTC) - info.run_after < timedelta(seconds=11)

    def test_a_start_date_makes_airflow_catch_up_from_there(self, stream):
        start = datetime(2026, 3, 1, tzinfo=UTC)
        dag = batch_dag(stream, start_date=start)
        assert dag.catchup is True
        info = dag.timetable.next_dagrun_info(
            last_automated_data_interval=None, restriction=TimeRestriction(dag.start_date, None, catchup=dag.catchup)
        )
        assert info.data_interval.start == start

    def test_the_definition_is_the_same_at_every_parse(self, stream):
        first, second = (DagSerialization.serialize_dag(batch_dag(stream)) for _ in range(2))
        assert first == second

    def test_concurrency_is_the_streams(self, stream):
        dag = batch_dag(stream)
        assert dag.max_active_runs == 2
        assert dag.dagrun_timeout is None
        assert batch_dag(stream, max_active_runs=1).max_active_runs == 1

    def test_what_a_run_may_ask_for_has_a_form(self, stream):
        params = served(batch_dag(stream)).params
        assert params.dump() == {"reprocess": False, "outputs": None, "from_kafka": False}
        assert params.deep_merge({"outputs": ["console"], "reprocess": True}).validate()["outputs"] == ["console"]
        with pytest.raises(ParamValidationError):
            params.deep_merge({"outputs": ["elsewhere"]}).validate()

    def test_only_declared_parameters_are_taken(self, stream):
        params = served(batch_dag(stream.model_copy(update={"parameters": {"limit": 3}}))).params
        assert params.dump()["parameters"] == {"limit": 3}
        assert params.deep_merge({"parameters": {"limit": 5}}).validate()["parameters"] == {"limit": 5}
        with pytest.raises(ParamValidationError):
            params.deep_merge({"parameters": {"other": 5}}).validate()

    def test_the_page_tells_what_the_stream_does(self, stream):
        doc = batch_dag(stream).doc_md
        for reported in ("flights", "kafka_flights", "Elasticsearch", "Every 10 s"):
            assert reported in doc
        assert "stream:flights" in batch_dag(stream).tags


class TestReceiverDag:
    def test_one_run_follows_another_and_never_two_at_once(self, stream):
        dag = receiver_dag(stream)
        assert dag.timetable.summary if hasattr(dag.timetable, "summary") else True
        assert dag.schedule == "@continuous"
        assert dag.max_active_runs == 1
        assert dag.task_ids == ["receive"]

    def test_it_survives_serialisation(self, stream):
        for dag in stream_dags(stream):
            again = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))
            assert again.dag_id == dag.dag_id
            assert set(again.task_ids) == set(dag.task_ids)

    def test_options_reach_the_dag(self, stream):
        dag = receiver_dag(stream, dag_id="mine", default_args={"retries": 1}, tags=["team"], owner_links={})
        assert dag.dag_id == "mine"
        assert dag.get_task("receive").retries == 1
        assert "team" in dag.tags


class TestReplayDag:
    def test_it_runs_each_output_elsewhere_and_nothing_by_itself(self, stream):
        dag = replay_dag(stream, "v2", outputs={"elasticsearch": {"index": "flights-v2"}}, transform="mended:run")
        assert dag.dag_id == "flights_replay_v2"
        assert (
            dag.timetable.next_dagrun_info(
                last_automated_data_interval=None, restriction=TimeRestriction(dag.start_date, None, catchup=False)
            )
            is None
        )
        task = dag.get_task("replay_batch").unmap({"step": "elasticsearch"})
        (output,) = task.replay.outputs
        assert (output.index, output.transform, task.target, task.stream) == ("flights-v2", "mended:run", "v2", stream)
        assert "flights-v2" in dag.doc_md
        DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))

    def test_it_is_tried_again_for_half_an_hour_since_no_later_run_takes_it_up(self, stream):
        dag = replay_dag(stream, "v2", outputs={"elasticsearch": {"index": "flights-v2"}})
        task = dag.get_task("replay_batch")
        assert (task.retries, task.max_retry_delay) == (30, timedelta(minutes=1))
        context = {"ti": SimpleNamespace(start_date=datetime.now(UTC) - timedelta(hours=1))}
        assert task.retry_policy.evaluate(RuntimeError("away"), 1, 30, context).action is RetryAction.DEFAULT

    def test_a_replay_onto_itself_is_refused(self, stream):
        with pytest.raises(StreamDefinitionError, match="as the stream does"):
            replay_dag(stream, "v2", outputs={"elasticsearch": {}})
        with pytest.raises(StreamDefinitionError, match="no name"):
            replay_dag(stream, "a/b", outputs={"elasticsearch": {"index": "flights-v2"}})


def test_a_stream_becomes_two_dags(stream):
    receiver, batches = stream_dags(stream)
    assert (receiver.dag_id, batches.dag_id) == ("flights_receiver", "flights_batches")
