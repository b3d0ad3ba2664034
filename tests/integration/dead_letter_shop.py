"""A stream whose batches have dead letters in a real Elasticsearch, and the commands about them."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.spark.outputs.elasticsearch_sink import withdraw_letters
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream

BATCHES = (1_700_000_010_000, 1_700_000_020_000)
N_IS_A_LONG = {"mappings": {"properties": {"n": {"type": "long"}}}}


class Shop:
    """The stream `shop`, what its batches index, and the commands about what they could not."""

    def __init__(self, url: str, folder: Path, **fields: Any) -> None:
        self.index = f"dead-letters-test-{uuid.uuid4().hex[:8]}"
        outputs = {"hosts": url, "index": self.index, "max_retry_seconds": 20, **fields.pop("output", {})}
        self.stream = Stream(
            **{
                "name": "shop",
                "inputs": KafkaInput(bootstrap_servers="localhost:9", topics="clicks"),
                "outputs": ElasticsearchOutput(**outputs),
                "batch_interval": "10 s",
                "storage": folder / "storage",
                "ledger": f"sqlite:///{folder}/ledger.db",
                **fields,
            }
        )
        self.url = url
        self.cluster = Cluster.of(self.stream.outputs[0])  # type: ignore[arg-type]
        self.transport = ElasticsearchTransport(self.cluster, connections=2, timeout_seconds=30)
        self.ask("PUT", f"/{self.index}", N_IS_A_LONG)
        self.declare(self.stream)

    def declare(self, stream: Stream) -> None:
        self.stream = stream
        with Ledger.open(stream.ledger) as ledger:
            register(ledger, stream)

    def write(
        self,
        *values: bytes | None,
        batch_time_ms: int = BATCHES[0],
        first: int = 0,
        attempt: int | None = None,
        began_ms: int = 0,
        **more: Any,
    ) -> Any:
        """Index the records of a batch, as its output would."""
        rows = pa.record_batch(
            {
                "topic": ["clicks"] * len(values),
                "partition": pa.array([0] * len(values), pa.int32()),
                "offset": pa.array(range(first, first + len(values)), pa.int64()),
                "key": pa.array([b"key-%d" % n for n in range(len(values))], pa.binary()),
                "value": pa.array(values, pa.binary()),
                "headers": pa.array(
                    [[{"key": "trace", "value": b"\xff"}]] * len(values),
                    pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
                ),
                "timestamp": pa.array([1_700_000_000_123] * len(values), pa.timestamp("ms", tz="UTC")),
                **more,
            }
        )
        return self.index_rows(rows, batch_time_ms=batch_time_ms, attempt=attempt, began_ms=began_ms)

    def index_rows(self, rows: pa.RecordBatch, *, batch_time_ms: int = BATCHES[0], **fields: Any) -> IndexingCounts:
        """Index rows of any columns."""
        return Indexer(self.transport, self.options(batch_time_ms=batch_time_ms, **fields)).index([rows])

    def options(self, **fields: Any) -> IndexingOptions:
        (output,) = self.stream.outputs
        assert isinstance(output, ElasticsearchOutput)
        return IndexingOptions.of(output, Target.of(output, "shop"), **fields)

    def settle(self, attempt: int, *, batch_time_ms: int = BATCHES[0]) -> int:
        """Withdraw what earlier attempts at the batch have said, as its output does in the end."""
        return withdraw_letters(self.options(batch_time_ms=batch_time_ms, attempt=attempt, withdraw_letters=True))

    def dead_letters(self, command: str, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["dead-letters", command, "shop", *arguments, "--ledger", self.stream.ledger])

    def reported(self, command: str, *arguments: str) -> Any:
        result = self.dead_letters(command, *arguments, "--json")
        assert result.exception is None or result.exit_code == 1, result.output
        return json.loads(result.stdout)

    def listed(self, *arguments: str) -> list[str]:
        (reported,) = self.reported("list", *arguments)
        return [letter["id"].removeprefix(self.letter("")) for letter in reported["letters"]]

    def letter(self, row: str) -> str:
        """The id of the letter of this row."""
        return f"shop/elasticsearch/{self.index}/{row}"

    def documents(self, suffix: str = "") -> dict[str, Any]:
        self.ask("POST", f"/{self.index}{suffix}/_refresh")
        hits = self.ask("POST", f"/{self.index}{suffix}/_search", {"size": 1000, "version": True})["hits"]["hits"]
        return {hit["_id"]: hit["_source"] for hit in hits}

    def correct_mapping(self) -> None:
        """Make the index anew, where n may be anything, with what it held."""
        held = self.documents()
        self.ask("DELETE", f"/{self.index}")
        self.ask("PUT", f"/{self.index}", {"mappings": {"properties": {"n": {"type": "keyword"}}}})
        for id_, document in held.items():
            self.ask("PUT", f"/{self.index}/_doc/{id_}", document)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.transport.request(method, path, None if body is None else json.dumps(body).encode())
        assert answer.status < 300, answer
        return answer.json()

    def close(self) -> None:
        for name in self.ask("GET", f"/{self.index}*/_settings?filter_path=*.settings.index.provided_name"):
            self.ask("DELETE", f"/{name}")
        self.transport.close()
