"""Turns a connector of Kafka Connect that writes to Elasticsearch or OpenSearch into the definition of a stream."""
