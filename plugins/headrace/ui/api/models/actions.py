"""The bodies and answers of actions, and the answer of an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from headrace.ui.api.models.base import Answer


class Preview(Answer):
    """What an action would do, or why it is refused: the words of the confirmation."""

    will: str
    refused: str | None = None


class Done(Answer):
    """What an action has done, in words."""

    done: str


class Reason(BaseModel):
    """The body of an action."""

    model_config = ConfigDict(extra="forbid")
    reason: str | None = Field(default=None, max_length=2000, examples=["The mapping is corrected."])


class AbandonBody(BaseModel):
    """Why a batch is abandoned. Nothing else explains the gap later."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(min_length=1, max_length=2000)
    output: str | None = Field(default=None, description="Give up only this output of the batch; null: the batch.")


class RunBody(Reason):
    """How a batch is run again."""

    outputs: tuple[str, ...] | None = Field(default=None, description="Only these outputs; null: all of them.")


class ReplayBody(Reason):
    """Where a batch is replayed to."""

    target: str = Field(description="The id of a replay DAG of the stream.", examples=["orders_replay_v2"])


class DeadLetterReplayBody(Reason):
    """Which dead letters are indexed again."""

    output: str
    limit: int = Field(default=1000, ge=1, le=10_000)


class Error(Answer):
    """An error: what happened, and what to do."""

    detail: str
    remedy: str | None = None
