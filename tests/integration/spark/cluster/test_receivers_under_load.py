"""Eight partitions and four receivers under load, while executors are killed and come back."""

from __future__ import annotations

import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.integration.spark.cluster.executors import process_of, running
from tests.support.spark_cluster import SparkCluster

from headrace.stream import KafkaInput, SparkSettings
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARTITIONS, RECEIVERS = 8, 4


class Load:
    """Produces to each partition, record after record, until it is stopped."""

    def __init__(self, kafka: str, topic: str) -> None:
        self.produced = 0
        self._producer = Producer({"bootstrap.servers": kafka, "linger.ms": 5})
        self._topic = topic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            for partition in range(PARTITIONS):
                self._producer.produce(self._topic, value=b"%d" % self.produced, partition=partition)
            self._producer.poll(0)
            self.produced += 1

    def stop(self) -> int:
        """Returns the number of records in each partition."""
        self._over.set()
        self._thread.join()
        assert self._producer.flush(240) == 0
        return self.produced


def test_killed_executors_lose_nothing_and_receivers_rebalance(
    kafka: str, cluster: SparkCluster, receiver_application: Callable[..., Any], tmp_path: Path
) -> None:
    """Nor is a record doubled; each receiver has as many partitions as before."""
    topic = f"load-{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()
    application = receiver_application(
        inputs=KafkaInput(bootstrap_servers=kafka, topics=topic, receivers=RECEIVERS),
        storage={"url": str(tmp_path / "storage"), "shared": True},
        spark=SparkSettings(
            master=cluster.url,
            run_batches="submit",
            conf={
                "spark.executor.cores": "2",
                "spark.executor.memory": "512m",
                "spark.cores.max": "6",
                "spark.scheduler.minRegisteredResourcesRatio": "1.0",
                "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
            },
        ),
    )

    def is_balanced() -> bool:
        now_ms = application.ledger.now_ms()
        live = {row.receiver_id.index for row in application.ledger.receivers.all("clicks") if row.alive(now_ms)}
        owners = Counter(
            row.receiver_index
            for row in application.ledger.positions.all("clicks")
            if row.receiver_index == row.wanted_receiver_index
        )
        return len(live) == RECEIVERS and owners == dict.fromkeys(live, PARTITIONS // RECEIVERS)

    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_CONF_DIR": str(cluster.conf_dir)}
    application.running_job(application.start_job(**environment))
    application.until("each receiver has two partitions", is_balanced)
    load = Load(kafka, topic)
    for _ in range(2):
        application.until("receivers on executors", lambda: sum(running(application).values()) == RECEIVERS)
        most = max(running(application).items(), key=lambda each: each[1])[0]
        epochs = sum(row.epoch for row in application.ledger.receivers.all("clicks"))
        process_of(application, most).kill()
        application.until(
            "a receiver's restart",
            lambda before=epochs: sum(r.epoch for r in application.ledger.receivers.all("clicks")) > before,
        )
        application.until("each receiver has two partitions again", is_balanced)
    records = load.stop()
    application.until(
        "all records are in the log",
        lambda: [row.next_offset for row in application.ledger.positions.all("clicks")] == [records] * PARTITIONS,
    )
    log = open_storage(application.stream.folder_url).below("log")
    offsets = {number: Counter[int]() for number in range(PARTITIONS)}
    for each in application.ledger.blocks.unclaimed("clicks", limit=100_000):
        for block in application.ledger.allocations.blocks_of("clicks", each.batch_time_ms):
            rows = read_block(log, block.info.handle)[1]
            for partition, offset in zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True):
                offsets[partition][offset] += 1
    assert offsets == {number: dict.fromkeys(range(records), 1) for number in range(PARTITIONS)}
