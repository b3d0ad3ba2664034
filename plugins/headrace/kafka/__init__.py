"""Everything that speaks to Kafka, but for the outputs: settings, questions, offset ranges, and records as Arrow."""
