"""One record's way: where it was in Kafka and in the log, which batch took it, and what each output made of it."""
