"""What a run may ask for, as Airflow's trigger form shows it and checks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import Param

if TYPE_CHECKING:
    from headrace.stream import Stream


def batch_params(stream: Stream) -> dict[str, Any]:
    """The params of a stream's batch DAG."""
    return {
        "reprocess": Param(
            False,
            type="boolean",
            title="Run it again",
            description="Run the batch again though it has completed: the same records, with the code as it is.",
        ),
        "outputs": outputs_param(stream),
        **parameters_param(stream),
        "from_kafka": Param(
            False,
            type="boolean",
            title="Build from Kafka",
            description="For a batch time from before the stream began: find its records in Kafka by their timestamps.",
        ),
    }


def outputs_param(stream: Stream) -> Param:
    """Which of the stream's steps a run is about."""
    return Param(
        None,
        type=["null", "array"],
        items={"type": "string", "enum": list(stream.steps)},
        # By its examples the form offers a choice.
        examples=list(stream.steps),
        title="Outputs",
        description="Run these alone; empty: all of them.",
    )


def parameters_param(stream: Stream) -> dict[str, Any]:
    """The values that the stream's transforms find, where it declares any."""
    if not stream.parameters:
        return {}
    return {
        "parameters": Param(
            dict(stream.parameters),
            type=["object", "null"],
            properties={name: {} for name in stream.parameters},
            additionalProperties=False,
            title="Parameters",
            description="Values for the transforms, in the place of the stream's own, for this run.",
        )
    }
