"""Keyed state: a table that each batch updates, and that the next one finds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from headrace.stream.model import Duration, Part
from headrace.stream.references import check_reference

STATE_STEP = "state"
"""The id of the state's update among a batch's steps, beside the outputs' ids."""


class State(Part):
    """A table by key that every batch updates in batch-time order; what updateStateByKey and mapWithState were.

    ``update`` is "module:function". It is given a DataFrame for each input by its id, as a transform is, and by name,
    where it has such a parameter:

    - ``state``: the table as the batch before left it, with the columns of ``fields``;
    - ``leaving``: with ``window``, the records of the batch that leaves it (with several inputs a mapping from their
      ids), so that an aggregate over a window can be kept by adding what came and subtracting what left;
    - ``timing_out``: with ``timeout``, the rows that nothing has changed for so long; this batch removes them, unless
      it changes them;
    - ``batch``: the `BatchContext`.

    It returns a DataFrame with the columns of ``fields``. With ``returns="state"`` (updateStateByKey) that is the
    whole new table: a key that is not in it is removed. With ``returns="changes"`` (mapWithState) it is the rows that
    changed, and an optional boolean column ``removed`` says which keys go.

    Transforms of outputs find the table after this batch under the parameter ``state``, and its changed rows under
    ``changes``.
    """

    update: str = Field(description='"module:function"')
    fields: str = Field(min_length=1, description="The table's columns in Spark's DDL: \"word STRING, count BIGINT\".")
    keys: tuple[str, ...] = Field(min_length=1)
    returns: Literal["state", "changes"] = "state"
    timeout: Duration | None = None
    window: Duration | None = Field(default=None, description='How far back "leaving" lies.')
    snapshot_every: PositiveInt = Field(default=10, description="Versions from one whole table to the next.")
    initial: str | None = Field(
        default=None,
        description='"module:function" that is given the Spark session and returns the table before the first batch.',
    )
    remember: Duration | None = Field(
        default=None,
        description="How far back a batch can be run again from its own state; by default the stream's remember.",
    )

    @field_validator("keys", mode="before")
    @classmethod
    def _one_key_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("update", "initial")
    @classmethod
    def _is_a_reference(cls, value: str | None) -> str | None:
        return None if value is None else check_reference(value)
