"""Access to Kafka: client settings, admin queries, offset ranges, the range reader, and records as Arrow."""
