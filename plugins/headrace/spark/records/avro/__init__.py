"""Values in Avro as Arrow's columns."""
