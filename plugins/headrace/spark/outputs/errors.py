"""What can stop a batch from being written to an output. None of these ever carries a credential."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.failure import Failure


class OutputError(HeadraceError):
    """The root of the errors of outputs."""


class OutputRowsError(OutputError):
    """The rows have a column that the output cannot take, or lack one that it needs."""

    failure = Failure.CODE


class OutputOptionsError(OutputError):
    """The data source behind the output was not told what it needs."""

    failure = Failure.CODE


class AttemptReplacedError(OutputError):
    """A later attempt at the batch took the output over; what this one wrote does not count."""


class CountsMissingError(OutputError):
    """The write ended without telling what it wrote."""


class OutputFolderError(OutputError):
    """The folder of a Parquet output cannot be written, or belongs to another output."""


class KafkaOutputError(OutputError):
    """Kafka did not take the batch; none of it is visible to consumers that read committed records."""


class TopicMissingError(KafkaOutputError):
    """The output's topic does not exist, or may not be described."""


class KafkaRefusedError(KafkaOutputError):
    """Kafka refuses the output's producer: credentials, permissions, or a setting."""


class MessageRefusedError(KafkaOutputError):
    """One of the batch's messages cannot be written: it is too large, or names a partition that is not there."""

    failure = Failure.CODE


class TransactionTimedOutError(KafkaOutputError):
    """The batch took longer than its transaction may last, and Kafka has aborted it."""


class RowsCutOffError(OutputError):
    """Spark's rows ended before their end was told: the job failed elsewhere, was cancelled, or its JVM died."""


class FunctionFailedError(OutputError):
    """A foreach_batch output's function raised, or returned what are no counts. What it raised says whose fault."""

    failure = Failure.CODE
