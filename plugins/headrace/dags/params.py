"""The Airflow params of a stream's DAGs: what a run may ask for. Airflow's trigger form shows and checks them."""

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
    """The param that limits a run to some of the stream's steps."""
    return Param(
        None,
        type=["null", "array"],
        items={"type": "string", "enum": list(stream.step_of_id)},
        # The form offers the examples as choices.
        examples=list(stream.step_of_id),
        title="Outputs",
        description="Run these alone; empty: all of them.",
    )


def parameters_param(stream: Stream) -> dict[str, Any]:
    """The param with the values for the stream's transforms; empty if the stream declares none."""
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
