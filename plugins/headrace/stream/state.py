"""Windows and keyed state: what a batch reads besides its own records.

A batch with a window also reads the records of earlier batches. Keyed state is a table that each batch updates and the
next batch reads.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from headrace.stream.ddl import ColumnsText, parse_columns
from headrace.stream.model import Duration, Part, Reference, Texts, milliseconds


class Window(Part):
    """The batches of the last ``length``, at every ``slide``; both are multiples of the batch interval.

    The window of batch time T holds the data interval ``[T - length, T)``. Between two slides an output with a window
    writes nothing, as in Spark: with a slide of 30 s it writes at batch times that are multiples of 30 s since the Unix
    epoch.

    A window holds whole batches. A batch that took over earlier batch times (coalescing) is, with all its records, in
    the windows that contain its own batch time.
    """

    length: Duration
    slide: Duration | None = Field(default=None, description="By default the batch interval.")

    @property
    def length_ms(self) -> int:
        """The window's length in milliseconds."""
        return milliseconds(self.length)

    def slide_ms(self, batch_interval_ms: int) -> int:
        """Milliseconds from one window to the next."""
        return batch_interval_ms if self.slide is None else milliseconds(self.slide)

    def is_due(self, batch_time_ms: int, batch_interval_ms: int) -> bool:
        """Whether a window ends at this batch time."""
        return batch_time_ms % self.slide_ms(batch_interval_ms) == 0

    def reach_ms(self, batch_interval_ms: int) -> int:
        """Milliseconds back to the window's start, or to the end of the window before it if that is earlier."""
        return max(self.length_ms, self.slide_ms(batch_interval_ms))

    def batch_times_ms(self, batch_time_ms: int, batch_interval_ms: int) -> range:
        """The batch times in the window that ends at ``batch_time_ms``, oldest first."""
        return _times_in(self.length_ms, batch_time_ms, batch_interval_ms)

    def fresh_times_ms(self, batch_time_ms: int, batch_interval_ms: int) -> range:
        """The batch times after the end of the previous window, oldest first."""
        return _times_in(self.slide_ms(batch_interval_ms), batch_time_ms, batch_interval_ms)


def _times_in(span_ms: int, batch_time_ms: int, batch_interval_ms: int) -> range:
    return range(batch_time_ms - span_ms + batch_interval_ms, batch_time_ms + 1, batch_interval_ms)


STATE_STEP = "state"
"""The id of the state's update among a batch's steps, beside the outputs' ids."""

REMOVED_FLAG = "removed"
"""The column that marks removed keys, in what an update returns and in what outputs read."""
OWN_COLUMNS = "_headrace_"
"""The prefix of headrace's own column names."""

# Types that Spark does not allow as a table's column.
_NOT_STORED = frozenset({"char", "character", "varchar"})
_NOT_COMPARED = frozenset({"map", "variant"})


class State(Part):
    """A table by key that every batch updates in batch-time order, like updateStateByKey and mapWithState in Spark.

    ``update`` is "module:function". As a transform it gets a DataFrame for each input by its id. It also gets those of
    the following for which it has a parameter:

    - ``state``: the table after the previous batch, with the columns of ``fields``;
    - ``leaving``: with ``window``, the records of the batch that leaves the window (with several inputs, a mapping from
      their ids). An aggregate over a window then adds the new records and subtracts the leaving ones;
    - ``timing_out``: with ``timeout``, the rows that were not changed for so long; this batch removes those that it
      does not change;
    - ``batch``: the `BatchContext`.

    It returns a DataFrame with the columns of ``fields``. With ``returns="state"`` (updateStateByKey) that is the
    whole new table: a key that is not in it is removed. With ``returns="changes"`` (mapWithState) it holds the changed
    rows, and an optional boolean column ``removed`` marks the keys to remove.

    Transforms of outputs get the table after this batch as the parameter ``state``, and its changed rows as
    ``changes``.
    """

    update: Reference = Field(description='"module:function"')
    fields: ColumnsText = Field(description="The table's columns in Spark's DDL: \"word STRING, count BIGINT\".")
    keys: Texts = Field(min_length=1)
    returns: Literal["state", "changes"] = "state"
    timeout: Duration | None = None
    window: Duration | None = Field(default=None, description='The length of the window that "leaving" leaves.')
    snapshot_every: PositiveInt = Field(
        default=10, description="Versions from one full table to the next; those between hold only the changes."
    )
    initial: Reference | None = Field(
        default=None,
        description='"module:function" that is given the Spark session and returns the table before the first batch.',
    )
    remember: Duration | None = Field(
        default=None,
        description="How far back a batch can be run again from its own state; by default the stream's remember.",
    )

    @model_validator(mode="after")
    def _has_its_keys_among_its_fields(self) -> Self:
        try:
            columns = {column.name: column.type for column in parse_columns(self.fields)}
        except ValueError as error:
            raise ValueError(f"fields {error}") from None
        missing = [key for key in self.keys if key not in columns]
        if missing:
            raise ValueError(
                f"keys {', '.join(missing)} are none of the fields {', '.join(columns)}; name them as the fields are "
                "written"
            )
        # Spark compares names without their case.
        lower = [name.lower() for name in columns]
        reserved = [name for name in columns if name.lower() == REMOVED_FLAG or name.lower().startswith(OWN_COLUMNS)]
        if reserved:
            raise ValueError(
                f"fields cannot hold a column {', '.join(reserved)}, which an update and the outputs need; give it "
                "another name"
            )
        if twice := [name for name in columns if lower.count(name.lower()) > 1]:
            raise ValueError(f"fields has {', '.join(twice)}, which are one name to Spark; give each its own")
        if parted := [name for name in columns if not {".", "`"}.isdisjoint(name)]:
            raise ValueError(
                f"fields has {', '.join(parted)}: Spark takes a . for a field within a column; write _ in its place"
            )
        for name, kind in columns.items():
            within = {field.name for field in kind.all()}
            if within & _NOT_STORED:
                raise ValueError(f"fields has {name} {kind.name.upper()}, of which Spark makes no table; take STRING")
            if name in self.keys and within & _NOT_COMPARED:
                raise ValueError(f"keys {name} cannot be a key: Spark compares no maps; take another column")
        return self
