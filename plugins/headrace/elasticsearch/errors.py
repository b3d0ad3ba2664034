"""What can stop a batch from being indexed. None of these ever carries a credential."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.failure import Failure


class IndexingError(HeadraceError):
    """The root of this package's errors."""


class IndexingOptionsError(IndexingError):
    """The sink's options or the connection do not make sense."""


class UnsuitableRowsError(IndexingError):
    """The rows lack a column that the ids need, or hold what no row may hold."""

    failure = Failure.CODE


class CollidingIdsError(IndexingError):
    """Rows of one batch have the same id, so that all but one of them would be lost."""

    failure = Failure.CODE


class ForeignDocumentsError(IndexingError):
    """The index holds other documents under ids of the batch, which the batch cannot have written."""

    failure = Failure.CODE


class UnsuitableTargetError(IndexingError):
    """The index is not one concrete index, so that ids would not be unique in it (rule 7)."""


class ElasticsearchUnavailableError(IndexingError):
    """Elasticsearch did not take the documents within ``max_retry_seconds``; nothing was dropped, re-run the batch."""


class ElasticsearchRefusedError(IndexingError):
    """Elasticsearch refuses the request for a reason that no repetition cures (credentials, missing index, ...)."""


class DeadLettersRefusedError(IndexingError):
    """A dead letter could not be written, so the batch may not report success."""


class TooManyDeadLettersError(IndexingError):
    """A batch has more dead letters than its output's limit allows; they are written."""

    failure = Failure.CODE


class DeadLetterMissingError(IndexingError):
    """There is no such dead letter."""


class LettersNotReplayableError(IndexingError):
    """No document of the output can be made of a dead letter's record alone."""


class DocumentsUnaccountedError(IndexingError):
    """The rows given in and the outcomes counted differ: a defect here, never passed over in silence."""


class IndexingCancelledError(IndexingError):
    """Another request of the same task failed, so this one stopped waiting for its turn."""
