"""headrace: micro-batch ingestion from Kafka to Elasticsearch that Airflow runs and Spark computes."""

__version__ = "0.1.0"
