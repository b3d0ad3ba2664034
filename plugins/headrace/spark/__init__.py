"""The Spark layer of headrace: the "wal" data source, the "elasticsearch" sink, and the two Spark applications."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register the formats "wal" (read) and "elasticsearch" (write) in a session, classic or Connect."""
    from headrace.spark.elasticsearch_sink import ElasticsearchDataSource
    from headrace.spark.wal_source import WalDataSource

    spark.dataSource.register(WalDataSource)
    spark.dataSource.register(ElasticsearchDataSource)
