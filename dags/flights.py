"""New York's flights, from the Kafka topic `flights` to the Elasticsearch index `flights`, every ten seconds.

This file gives Airflow three DAGs: `flights_receiver` keeps the receiver job alive, `flights_batches` runs the batches,
`flights_repair` tries again what failed.
"""

from __future__ import annotations

from deployment import LEDGER, SPARK, STORAGE

from headrace.dags import stream_dags
from headrace.stream import ElasticsearchOutput, KafkaInput, Limits, Stream

stream = Stream(
    name="flights",
    inputs=KafkaInput(connection="kafka_default", topics="flights"),
    # Each record becomes one document with the id topic+partition+offset. Records that Elasticsearch refuses go to the
    # index flights-dead-letters.
    outputs=ElasticsearchOutput(connection="elasticsearch_default", index="flights"),
    batch_interval="10 s",
    # A new log segment every ten seconds: indexed and checkpointed blocks are deleted half a minute later.
    limits=Limits(segment_interval="10 s"),
    storage=STORAGE,
    ledger=LEDGER,
    spark=SPARK,
)

receiver, batches = stream_dags(stream)
