"""Spark's side of headrace: the "wal" data source, the "elasticsearch" sink, and the two Spark applications."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make ``spark.read.format("wal")`` and ``df.write.format("elasticsearch")`` known to a session, of either kind."""
    from headrace.spark.elasticsearch_sink import ElasticsearchDataSource
    from headrace.spark.wal_source import WalDataSource

    spark.dataSource.register(WalDataSource)
    spark.dataSource.register(ElasticsearchDataSource)
