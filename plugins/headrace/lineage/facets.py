"""The facets of headrace in OpenLineage's events."""

from __future__ import annotations

import attr
from openlineage.client.facet_v2 import InputDatasetFacet, RunFacet


@attr.define
class OffsetRange:
    """The offsets ``[fromOffset, untilOffset)`` of a partition, with ``records`` records.

    ``incarnation`` is 1 for the first topic of this name, and grows when the topic is deleted and created again.
    """

    partition: int
    fromOffset: int  # noqa: N815 - OpenLineage's names are in camel case
    untilOffset: int  # noqa: N815
    records: int
    incarnation: int = 1


@attr.define
class OffsetRangesFacet(InputDatasetFacet):
    """What a batch has read of a topic: the facet ``headrace_offsets`` of an input dataset."""

    ranges: list[OffsetRange] = attr.field(factory=list)


@attr.define
class BatchFacet(RunFacet):
    """The batches that a task has run: the facet ``headrace_batches`` of a run."""

    stream: str
    batchTimes: list[str] = attr.field(factory=list)  # noqa: N815
    """Batch times in ISO 8601."""
    target: str = ""
    """The name of the replay, "" if the batches were run themselves."""
