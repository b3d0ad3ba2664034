"""The errors of writing a batch to an output. None of them ever contains a credential."""

from __future__ import annotations

from headrace.errors import Failure, HeadraceError


class OutputError(HeadraceError):
    """The base class of the errors of outputs."""


class OutputRowsError(OutputError):
    """The rows have a column that the output cannot write, or lack one that it needs."""

    failure = Failure.CODE


class OutputOptionsError(OutputError):
    """An option of the output's data source is missing or invalid."""

    failure = Failure.CODE


class AttemptReplacedError(OutputError):
    """A later attempt at the batch replaced this one; what this attempt wrote is discarded."""


class CountsMissingError(OutputError):
    """The write ended without reporting its counts."""


class OutputFolderError(OutputError):
    """The folder of a Parquet output cannot be written, or belongs to another output."""


class KafkaOutputError(OutputError):
    """Kafka did not accept the batch; none of it is visible to consumers that read committed records."""


class TopicMissingError(KafkaOutputError):
    """The output's topic does not exist, or may not be described."""


class KafkaRefusedError(KafkaOutputError):
    """Kafka refuses the output's producer: credentials, permissions, or a setting."""


class MessageRefusedError(KafkaOutputError):
    """Kafka refuses one of the batch's messages: for example it is too large, or names a partition that is missing."""

    failure = Failure.CODE


class TransactionTimedOutError(KafkaOutputError):
    """The batch took longer than the transaction timeout, and Kafka has aborted it."""


class RowsCutOffError(OutputError):
    """Spark's rows ended without the end marker: the job failed elsewhere, was cancelled, or its JVM died."""


class FunctionFailedError(OutputError):
    """A foreach_batch output's function raised an error or returned invalid counts.

    ``failure`` is set from the error that the function raised.
    """

    failure = Failure.CODE
