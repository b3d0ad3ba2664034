"""The kinds of a search server's errors, by their type: who has to act on an error of one document.

The types are the names of Elasticsearch's and OpenSearch's exceptions, as their answers write them: the class's name in
snake case, without a leading "Elasticsearch" or "OpenSearch". A type that is not in the table has no kind; a user gives
it one, or another one than the table's, with ``error_kinds`` of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ErrorKind(StrEnum):
    """Who has to act on an error."""

    DOCUMENT = "document"
    """The document is at fault: it becomes a dead letter."""
    PASSING = "passing"
    """Nobody: the same request may succeed later."""
    CREDENTIAL = "credential"
    """A person who gives rights to the connection's user: the batch fails."""
    INDEX = "index"
    """A person who administers the index: the batch fails."""


VERSION_CONFLICTS = frozenset({"version_conflict_engine_exception", "document_already_exists_exception"})
"""The answer about an id that exists. It is settled by comparing the documents, so it has no kind."""

NO_TYPE = "unknown"
"""Stands for the type of an error that has none: only a text, or nothing. Proxies answer so."""

SIZE = frozenset({"circuit_breaking_exception", "content_too_long_exception"})
"""The request does not fit into the memory that the server has now: a smaller one may."""
SIZE_TEXT = "operation_bytes="
"""In the reason of an ``es_rejected_execution_exception`` that is about the bytes of the request, not about a queue."""

COMPUTATION = frozenset(
    {
        "arithmetic_exception",
        "array_index_out_of_bounds_exception",
        "array_store_exception",
        "class_cast_exception",
        "concurrent_modification_exception",
        "date_time_exception",
        "date_time_parse_exception",
        "empty_stack_exception",
        "general_script_exception",
        "index_out_of_bounds_exception",
        "negative_array_size_exception",
        "no_such_element_exception",
        "null_pointer_exception",
        "string_index_out_of_bounds_exception",
        "unsupported_operation_exception",
        "unsupported_temporal_type_exception",
    }
)
"""What Java code raises over a value: with status 500, but no later try of the same document helps."""
OF_PROCESSORS = COMPUTATION | {"illegal_argument_exception", "number_format_exception", "script_exception"}
"""With these, the processors of ingest pipelines refuse a document."""

_DOCUMENT = frozenset(
    {
        # It does not fit the mapping.
        "document_parsing_exception",
        "mapper_parsing_exception",
        "mapper_exception",
        "strict_dynamic_mapping_exception",
        "max_bytes_length_exceeded_exception",
        # It is no JSON, or nested too deep.
        "parsing_exception",
        "parse_exception",
        "x_content_parse_exception",
        "x_content_e_o_f_exception",
        "json_parse_exception",
        "json_e_o_f_exception",
        "stream_constraints_exception",
        "input_coercion_exception",
        # Its id, its version.
        "action_request_validation_exception",
        # A pipeline rejects it on purpose.
        "fail_processor_exception",
        "dissect_exception",
    }
)
_CREDENTIAL = frozenset(
    {
        "security_exception",
        "authentication_exception",
        "authorization_exception",
        "unauthorized_exception",
        "access_control_exception",
        "forbidden_exception",
    }
)
_INDEX = frozenset(
    {
        "index_closed_exception",
        "index_not_found_exception",
        "invalid_index_name_exception",
        "invalid_alias_name_exception",
        "alias_action_failed_exception",
        # No room for another shard in the cluster.
        "validation_exception",
        "routing_missing_exception",
    }
)
_PASSING = frozenset(
    {
        # A shard or a node is not ready, busy or gone.
        "unavailable_shards_exception",
        "no_shard_available_action_exception",
        "shard_not_found_exception",
        "shard_not_in_primary_mode_exception",
        "shard_lock_obtain_failed_exception",
        "illegal_index_shard_state_exception",
        "index_shard_not_started_exception",
        "index_shard_not_recovering_exception",
        "index_shard_recovering_exception",
        "index_shard_relocated_exception",
        "index_shard_closed_exception",
        "index_primary_shard_not_allocated_exception",
        "retry_on_primary_exception",
        "retry_on_replica_exception",
        "replication_failed_exception",
        "already_closed_exception",
        "node_closed_exception",
        "node_not_connected_exception",
        "node_disconnected_exception",
        "node_health_check_failure_exception",
        "connect_exception",
        "connect_transport_exception",
        "send_request_transport_exception",
        "receive_timeout_transport_exception",
        "remote_transport_exception",
        "transport_exception",
        "response_handler_failure_transport_exception",
        "action_not_found_transport_exception",
        "timeout_exception",
        "socket_timeout_exception",
        "task_cancelled_exception",
        "interrupted_exception",
        "cancellation_exception",
        # The master is gone or busy.
        "master_not_discovered_exception",
        "cluster_manager_not_discovered_exception",
        "not_master_exception",
        "not_cluster_manager_exception",
        "process_cluster_event_timeout_exception",
        "failed_to_commit_cluster_state_exception",
        "coordination_state_rejected_exception",
        # A block ends when someone frees disk space or ends the maintenance; max_retry_seconds limits the wait.
        "cluster_block_exception",
        "index_create_block_exception",
        # No room now.
        "es_rejected_execution_exception",
        "rejected_execution_exception",
        "out_of_memory_error",
        # A disk or a shard's files: full, or lost until a copy takes over.
        "i_o_exception",
        "file_system_exception",
        "no_such_file_exception",
        "corrupt_index_exception",
        "translog_exception",
        "translog_corrupted_exception",
        "engine_creation_failure_exception",
        "engine_exception",
        "recovery_engine_exception",
        "refresh_failed_engine_exception",
        "flush_failed_engine_exception",
        "index_failed_engine_exception",
        "delete_failed_engine_exception",
        "too_many_open_files_exception",
    }
)

KIND_OF: Mapping[str, ErrorKind] = {
    **dict.fromkeys(_DOCUMENT | COMPUTATION, ErrorKind.DOCUMENT),
    **dict.fromkeys(_CREDENTIAL, ErrorKind.CREDENTIAL),
    **dict.fromkeys(_INDEX, ErrorKind.INDEX),
    **dict.fromkeys(_PASSING | SIZE, ErrorKind.PASSING),
}
"""The kinds by type. A type that any check in the server's code raises, such as ``illegal_argument_exception``, is not
here: its text decides (``verdicts``)."""


def is_size(kind: str, text: str) -> bool:
    """Whether an error is about the size of the request."""
    return kind in SIZE or SIZE_TEXT in text
