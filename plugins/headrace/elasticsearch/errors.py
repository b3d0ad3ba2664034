"""The errors of indexing a batch. None of them ever contains a credential."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import Failure, HeadraceError


class IndexingError(HeadraceError):
    """The base class of this package's errors."""


class IndexingOptionsError(IndexingError):
    """The sink's options or the connection are invalid."""


class UnsuitableRowsError(IndexingError):
    """The rows lack a required column, or hold values or types that the sink cannot use."""

    failure = Failure.CODE


class FieldsUnknownError(IndexingError):
    """The fields of an output's documents are not known, or not known yet."""

    failure = Failure.CODE


class MappingError(IndexingError):
    """No mapping can be made of the columns: the server takes no such names, or not beside each other."""

    failure = Failure.CODE


class DuplicateIdsError(IndexingError):
    """Rows of one batch have the same id, so that all but one of them would be lost."""

    failure = Failure.CODE


class ForeignDocumentsError(IndexingError):
    """The index holds other documents under ids of the batch, and the batch cannot have written them."""

    failure = Failure.CODE


class ForeignVersionsError(IndexingError):
    """The index holds versions that are no offsets of the topic, and no batch times: updates would be lost."""


class UnsuitableTargetError(IndexingError):
    """The index is not one concrete index, so ids would not be unique in it (rule 7)."""


class TooManyIndicesError(IndexingError):
    """The rows of a batch name more indices than the output allows. Nothing of the batch was sent."""

    failure = Failure.CODE


class TargetChangedError(IndexingError):
    """An output's name stands for another index than the one of its earlier batches, or for none any more."""


class IndexNotWritableError(IndexingError):
    """An index has a block on writes, or the user lacks a privilege on it."""


class ElasticsearchUnavailableError(IndexingError):
    """Elasticsearch did not accept the documents within ``max_retry_seconds``. Nothing was dropped; rerun the batch."""


class ElasticsearchRefusedError(IndexingError):
    """Elasticsearch refuses the request for a reason that a retry cannot correct (credentials, missing index, ...)."""


class DeadLettersRefusedError(IndexingError):
    """A dead letter could not be written, so the batch may not report success."""


class TooManyDeadLettersError(IndexingError):
    """A batch has more dead letters than its output's limit allows. The letters were written.

    ``exceeded`` names the limit, ``counts`` are those of the write.
    """

    failure = Failure.CODE

    def __init__(self, what: str, *, remedy: str, exceeded: str, counts: Mapping[str, Any]) -> None:
        super().__init__(what, remedy=remedy)
        self.exceeded = exceeded
        self.counts = counts


class DeadLetterMissingError(IndexingError):
    """There is no such dead letter."""


class DocumentsUnaccountedError(IndexingError):
    """The numbers of input rows and of counted outcomes differ: a defect of headrace, which is always reported."""


class IndexingCancelledError(IndexingError):
    """Another request of the same task failed, so this one stopped waiting for its next try."""
