"""Schema registries with Confluent's API: the client, the frame around values, and the schemas that a stream keeps."""
