"""Messages of Protobuf as Arrow's columns."""
