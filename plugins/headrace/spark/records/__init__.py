"""A batch's records as DataFrames: read from the log or Kafka, decoded and transformed."""
