from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowNotFoundException

from headrace.hooks.spark_submit import SparkConnectionConflictError, StreamSparkSubmitHook, application
from headrace.stream import ElasticsearchOutput, KafkaInput, SparkSettings, Stream


def make(tmp_path, **spark) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(connection="kafka_flights", topics="flights"),
        outputs=ElasticsearchOutput(hosts="http://localhost:9200", index="flights"),
        batch_interval="10 s",
        storage={"url": str(tmp_path), "shared": True},
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        spark=SparkSettings(**spark),
    )


@pytest.fixture(autouse=True)
def airflow(monkeypatch):
    connection = {"conn_type": "kafka", "extra": {"sasl.password": "s3cret"}}
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_FLIGHTS", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "k" * 32)


def hook(stream: Stream, **options) -> StreamSparkSubmitHook:
    arguments = ["--stream", stream.name]
    return StreamSparkSubmitHook(stream, application_args=arguments, name="headrace receiver flights", **options)


def test_the_streams_settings_make_the_command(tmp_path):
    stream = make(tmp_path, master="local[4]", conf={"spark.driver.memory": "1g"}, py_files=("/code/mine.zip",))
    command = hook(stream).command("/app/receiver.py")
    assert command[0] == "spark-submit"
    assert command[command.index("--master") + 1] == "local[4]"
    assert command[command.index("--name") + 1] == "headrace receiver flights"
    assert "spark.driver.memory=1g" in command
    assert "spark.submit.callSystemExitOnMainExit=true" in command
    assert command[command.index("--py-files") + 1] == "/code/mine.zip"
    assert command[-3:] == ["/app/receiver.py", "--stream", "flights"]


def test_no_secret_is_on_the_command_line_but_all_in_environment(tmp_path):
    made = hook(make(tmp_path, master="local[4]"))
    assert not any("s3cret" in part or "k" * 32 in part for part in made.command("/app/receiver.py"))
    assert "s3cret" in made.environment()["AIRFLOW_CONN_KAFKA_FLIGHTS"]


def test_a_spark_connection_of_airflow_gives_the_master(tmp_path, monkeypatch):
    connection = {"conn_type": "spark", "host": "spark://master", "port": 7077, "extra": {"deploy-mode": "client"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_CLUSTER", json.dumps(connection))
    command = hook(make(tmp_path, connection="spark_cluster")).command("/app/receiver.py")
    assert command[command.index("--master") + 1] == "spark://master:7077"
    assert command[command.index("--deploy-mode") + 1] == "client"


def test_a_task_may_have_a_connection_if_its_stream_has_no_other(tmp_path, monkeypatch):
    connection = {"conn_type": "spark", "host": "spark://master", "port": 7077}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(connection))
    for settings in ({"master": "local[4]"}, {"connection": "cluster"}):
        command = hook(make(tmp_path, **settings), conn_id="cluster").command("/app/micro_batch.py")
        assert command[command.index("--master") + 1] == "spark://master:7077"
    with pytest.raises(SparkConnectionConflictError, match="'cluster', and stream 'flights' has 'other'"):
        hook(make(tmp_path, connection="other"), conn_id="cluster")


def test_a_tasks_settings_win_over_the_streams(tmp_path, capsys):
    """The log names them without their values."""
    conf = {"spark.executor.memory": "1g", "spark.executor.instances": "2", "spark.label": "a", "spark.same": "1"}
    conf["spark.driver.memory"] = "1g"
    stream = make(tmp_path, master="yarn", conf=conf)
    made = hook(
        stream,
        executor_memory="2g",
        num_executors=2,
        driver_memory=None,
        conf={"spark.label": "b", "spark.same": "1"},
    )
    logged = re.findall(r"(\S+) is this operator's, not the one of the stream", capsys.readouterr().out)
    assert logged == ["spark.label", "spark.executor.memory"]
    command = made.command("/app/micro_batch.py")
    assert "spark.label=b" in command
    assert "spark.label=a" not in command
    assert command[command.index("--executor-memory") + 1] == "2g"


def test_a_connection_that_is_not_there_is_no_yarn_cluster(tmp_path):
    with pytest.raises(AirflowNotFoundException, match="no_such"):
        hook(make(tmp_path, connection="no_such"))


@pytest.mark.parametrize("name", ["receiver.py", "micro_batch.py"])
def test_the_applications_are_found(name):
    assert Path(application(name)).is_file()


def test_on_one_machine_receivers_get_slots_besides_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    stream = make(tmp_path)
    masters = [
        StreamSparkSubmitHook(stream, application_args=[], name="x", receivers=receivers)._connection["master"]
        for receivers in (0, 3)
    ]
    assert masters == ["local[2]", "local[5]"]
