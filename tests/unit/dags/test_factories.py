from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from airflow.models.backfill import _get_info_list
from airflow.sdk import DAG, AssetOrTimeSchedule
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.base import TimeRestriction
from airflow.timetables.simple import AssetTriggeredTimetable
from pendulum import DateTime

from headrace.airflow_versions import RetryAction, policy_of
from headrace.batch.build_from_kafka import BatchBuildError
from headrace.batch.manifest import ManifestError
from headrace.dags import again_dag, batch_dag, receiver_dag, repair_dag, replay_dag, stream_dags
from headrace.dags.factories import received_schedule
from headrace.ledger.errors import LedgerUnavailableError
from headrace.runs.batch_run import NoBatchTimeError
from headrace.stream import (
    BatchTrigger,
    ConsoleOutput,
    ElasticsearchOutput,
    KafkaInput,
    KeyIds,
    Limits,
    RecordIds,
    State,
    Stream,
    StreamDefinitionError,
)
from headrace.timetables.micro_batch import MicroBatchTimetable

# Airflow 3.2 checks the params of a stored DAG with a plain error.
INVALID = (ParamValidationError, ValueError)
OUTPUTS = ["generate_batch.console", "generate_batch.elasticsearch"]


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
    def test_the_steps_follow_each_other_with_outputs_side_by_side(self, stream):
        dag = batch_dag(stream)
        stages = [["await_blocks"], ["allocate_blocks"], OUTPUTS, ["checkpoint"], ["cleanup"]]
        assert sorted(dag.task_ids) == sorted(task_id for stage in stages for task_id in stage)
        for before, after in pairwise(stages):
            for task_id in before:
                assert dag.get_task(task_id).downstream_task_ids == set(after)

    def test_a_run_has_its_tasks_whatever_its_date(self, stream):
        """Airflow leaves out tasks that start after a triggered run's date, and a run without tasks succeeds."""
        dag = served(batch_dag(stream))
        assert {task.start_date for task in dag.tasks} == {datetime(1970, 1, 1, tzinfo=UTC)}
        with pytest.raises(ValueError, match="Batch times are counted from the start of 1970"):
            dag.timetable.infer_manual_data_interval(run_after=DateTime(1969, 12, 31, 23, 59, 59, tzinfo=UTC))

    def test_each_output_is_a_task_of_its_own(self, stream):
        dag = batch_dag(stream)
        for output in stream.outputs:
            task = dag.get_task(f"generate_batch.{output.id}")
            assert (task.step, task.stream) == (output.id, stream)

    def test_an_outputs_task_keeps_its_id_beside_a_new_output(self, stream):
        (single,) = (output for output in stream.outputs if output.id == "console")
        one = batch_dag(stream.model_copy(update={"outputs": (single,)}))
        assert set(one.task_ids) - set(batch_dag(stream).task_ids) == set()
        assert "generate_batch.console" in one.task_ids

    def test_the_longest_output_id_is_a_task_id(self, stream):
        output = ConsoleOutput(id="a" + "-_9" * 20 + "-b")
        dag = batch_dag(stream.model_copy(update={"outputs": (output,)}))
        assert f"generate_batch.{output.id}" in served(dag).task_ids

    def test_state_is_updated_before_the_outputs(self, stream):
        stateful = stream.model_copy(update={"state": State(update="m:f", fields="k STRING", keys="k")})
        dag = batch_dag(stateful)
        assert dag.get_task("update_state").step == "state"
        assert dag.get_task("update_state").upstream_task_ids == {"allocate_blocks"}
        for task_id in OUTPUTS:
            assert dag.get_task(task_id).upstream_task_ids == {"update_state"}

    def test_a_task_is_tried_again_once_and_soon(self, stream):
        """Its run fails in time."""
        for task in batch_dag(stream).tasks:
            assert task.retries == 1
            assert task.retry_delay == timedelta(seconds=5)
            decide = partial(policy_of(task).evaluate, try_number=1, max_tries=1)
            final = (ManifestError("damaged"), BatchBuildError("is its own"), NoBatchTimeError("no date"))
            for error in final:
                assert decide(error).action is RetryAction.FAIL
            code = StreamDefinitionError("the user's code")
            assert [decide(code, try_number=number).action for number in (1, 2)] == [
                RetryAction.DEFAULT,
                RetryAction.FAIL,
            ]
            for seconds, action in ((5, RetryAction.DEFAULT), (31, RetryAction.FAIL)):
                started = datetime.now(UTC) - timedelta(seconds=seconds)
                context = {"ti": SimpleNamespace(start_date=started)}
                assert decide(LedgerUnavailableError("away"), context=context).action is action
            assert decide(RuntimeError("anything")).action is RetryAction.DEFAULT
        assert batch_dag(stream, default_args={"retries": 3}).get_task(OUTPUTS[0]).retries == 3

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

    def test_a_failed_batch_fails_the_run_despite_its_later_tasks(self, stream):
        """The checkpoint and the cleanup run after it, and succeed."""
        from airflow.models.dagrun import DagRun

        dag = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(batch_dag(stream)))

        class Instance:
            state = None

            def __init__(self, task_id):
                self.task_id = task_id

        leaves = DagRun._tis_for_dagrun_state(DagRun(), dag=dag, tis=[Instance(task_id) for task_id in dag.task_ids])
        assert {leaf.task_id for leaf in leaves} == {*OUTPUTS, "cleanup"}
        for step in ("checkpoint", "cleanup"):
            assert dag.get_task(step).is_teardown
            assert dag.get_task(step).trigger_rule == "all_done_setup_success"

    def test_runs_are_those_of_the_timetable_from_now_on(self, stream):
        dag = batch_dag(stream)
        assert dag.timetable == MicroBatchTimetable(timedelta(seconds=10), ahead=timedelta(seconds=1))
        assert dag.catchup is False
        info = dag.timetable.next_dagrun_info(
            last_automated_data_interval=None, restriction=TimeRestriction(dag.start_date, None, catchup=dag.catchup)
        )
        # The latest interval that has ended: the run takes over what came before.
        assert timedelta(0) <= datetime.now(UTC) - info.run_after < timedelta(seconds=11)

    def test_runs_begin_a_tenth_of_a_short_interval_ahead(self, stream):
        short = stream.model_copy(update={"batch_interval": timedelta(seconds=2)})
        assert batch_dag(short, dag_id="short").timetable.ahead == timedelta(milliseconds=200)

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
        with pytest.raises(INVALID):
            params.deep_merge({"outputs": ["elsewhere"]}).validate()

    def test_only_declared_parameters_are_taken(self, stream):
        params = served(batch_dag(stream.model_copy(update={"parameters": {"limit": 3}}))).params
        assert params.dump()["parameters"] == {"limit": 3}
        assert params.deep_merge({"parameters": {"limit": 5}}).validate()["parameters"] == {"limit": 5}
        with pytest.raises(INVALID):
            params.deep_merge({"parameters": {"other": 5}}).validate()

    def test_the_dags_page_describes_the_stream(self, stream):
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
        dag = replay_dag(stream, "v2", outputs={"elasticsearch": {"index": "flights-v2"}}, transform="fixed:run")
        assert dag.dag_id == "flights_replay_v2"
        assert (
            dag.timetable.next_dagrun_info(
                last_automated_data_interval=None, restriction=TimeRestriction(dag.start_date, None, catchup=False)
            )
            is None
        )
        assert dag.task_ids == ["replay_batch.elasticsearch"]
        task = dag.get_task("replay_batch.elasticsearch")
        (output,) = task.replay.outputs
        assert (output.index, output.transform, task.target, task.stream) == (
            "flights-v2",
            "fixed:run",
            "v2",
            stream,
        )
        assert task.step == "elasticsearch"
        assert "flights-v2" in dag.doc_md
        DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))

    def test_a_replay_is_retried_for_half_an_hour(self, stream):
        """No later run takes a replay up."""
        dag = replay_dag(stream, "v2", outputs={"elasticsearch": {"index": "flights-v2"}})
        task = dag.get_task("replay_batch.elasticsearch")
        assert (task.retries, task.retry_delay) == (30, timedelta(minutes=1))
        context = {"ti": SimpleNamespace(start_date=datetime.now(UTC) - timedelta(hours=1))}
        assert policy_of(task).evaluate(RuntimeError("away"), 1, 30, context).action is RetryAction.DEFAULT

    def test_a_replay_that_deletes_by_key_has_no_backward_backfill(self, stream):
        stream = stream.model_copy(update={"limits": Limits()})
        for ids, ordered in ((RecordIds(), False), (KeyIds(), True)):
            fields = {"index": "flights-v2", "document_ids": ids}
            dag = replay_dag(stream, "v2", outputs={"elasticsearch": fields})
            assert dag.get_task("replay_batch.elasticsearch").depends_on_past is ordered

    def test_a_replay_onto_itself_is_refused(self, stream):
        with pytest.raises(StreamDefinitionError, match="as the stream does"):
            replay_dag(stream, "v2", outputs={"elasticsearch": {}})
        with pytest.raises(StreamDefinitionError, match="no name"):
            replay_dag(stream, "a/b", outputs={"elasticsearch": {"index": "flights-v2"}})


def test_a_stream_becomes_two_dags(stream):
    receiver, batches = stream_dags(stream)
    assert (receiver.dag_id, batches.dag_id) == ("flights_receiver", "flights_batches")


class TestRepairDag:
    def test_it_is_started_by_its_asset_alone_and_not_paused(self, stream):
        dag = repair_dag(stream)
        (asset,) = dag.timetable.asset_condition.objects
        (watcher,) = asset.watchers
        assert asset.uri == "headrace://flights/repair"
        assert watcher.trigger.serialize()[1]["retry_for_ms"] == stream.retry_for_ms
        assert (dag.dag_id, dag.max_active_runs, dag.is_paused_upon_creation) == ("flights_repair", 1, False)

    def test_a_task_is_tried_once_since_the_next_run_is_the_retry(self, stream):
        assert {task.retries for task in repair_dag(stream).tasks} == {0}

    def test_what_was_completed_is_reported_though_the_repair_failed(self, stream):
        dag = repair_dag(stream)
        assert dag.get_task("checkpoint").is_teardown
        assert dag.get_task("checkpoint").upstream_task_ids == {"repair"}

    def test_it_looks_at_the_batch_dag_that_is_named(self, stream):
        assert repair_dag(stream).get_task("repair").batch_dag_id == "flights_batches"
        assert repair_dag(stream, batch_dag_id="mine").get_task("repair").batch_dag_id == "mine"


class TestAgainDag:
    def test_a_run_takes_a_range_and_nothing_else_starts_one(self, stream):
        dag = again_dag(stream)
        assert (dag.dag_id, dag.schedule, dag.max_active_runs) == ("flights_again", None, 1)
        assert not dag.is_paused_upon_creation
        assert {"from", "until", "outputs"} <= set(dag.params)
        assert dag.get_task("checkpoint").is_teardown
        assert {task.retries for task in dag.tasks} == {30}

    def test_a_stream_with_state_has_none(self, stream):
        state = State(update="m:f", fields="k STRING", keys="k")
        with pytest.raises(StreamDefinitionError, match="Backfill its batch DAG"):
            again_dag(make_stream(state=state))


START = datetime(2026, 3, 1, tzinfo=UTC)


def make_stream(**fields) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=ConsoleOutput(),
        batch_interval="2 s",
        storage="/somewhere",
        ledger="sqlite:////somewhere/ledger.db",
        **fields,
    )


def test_a_triggered_dag_is_started_by_the_asset_alone():
    """It can be backfilled nevertheless."""
    triggered = make_stream(trigger={"min_records": 500, "max_delay": "1 min"})
    dag = DAG("flights_batches", schedule=received_schedule(triggered), start_date=START, catchup=False)
    kept = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    # What the scheduler asks of a DAG that assets start.
    assert isinstance(kept.timetable, AssetTriggeredTimetable)
    assert [asset.uri for _, asset in kept.timetable.asset_condition.iter_assets()] == ["headrace://flights/received"]
    assert kept.next_dagrun_info(last_automated_run_info=None) is None
    infos = _get_info_list(from_date=START, to_date=START.replace(second=4), reverse=False, dag=kept)
    assert [run.logical_date.second for run in infos] == [0, 2, 4]


def test_the_watcher_knows_the_streams_limits():
    (asset,) = (found for _, found in _assets(make_stream(trigger={"min_records": 500, "max_delay": "1 min"})))
    (watcher,) = asset.watchers
    assert watcher.trigger.parameters == {
        "min_records": 500, "max_delay_ms": 60_000, "interval_ms": 2000, "repeat_after_ms": 300_000,
    }  # fmt: skip


def _assets(declared: Stream):
    return [("", asset) for asset in received_schedule(declared).asset_condition.objects]


def test_a_stream_without_trigger_is_started_by_the_clock():
    with pytest.raises(StreamDefinitionError, match="min_records"):
        received_schedule(make_stream())
