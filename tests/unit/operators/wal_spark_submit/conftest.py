"""The operator of a batch's outputs, and a spark-submit that runs the toy in its place."""

from __future__ import annotations

import sys
from subprocess import CalledProcessError

import pytest
from tests.unit.operators.toy_micro_batch import InThisProcess

from headrace.operators.wal_spark_submit import WalSparkSubmitOperator


def make(stream, **options) -> WalSparkSubmitOperator:
    return WalSparkSubmitOperator(task_id="generate", stream=stream, **options)


@pytest.fixture
def submitted(monkeypatch, toy_batch):
    """What would go to spark-submit; it runs the toy."""
    from headrace.hooks.spark_submit import StreamSparkSubmitHook

    commands = []

    def submit(hook, application="", **kwargs):
        commands.append(hook.command(application))
        batch = InThisProcess([sys.executable, application, *hook._application_args], env=hook.environment())
        if batch.returncode:
            raise CalledProcessError(batch.returncode, commands[-1])

    monkeypatch.setattr(StreamSparkSubmitHook, "submit", submit)
    return commands
