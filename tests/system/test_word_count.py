"""Spark's quick example as a stream, its DAG file as it is in dags/: every word is counted once."""

from __future__ import annotations

import io

import pytest
from examples.demo.stack import DemoStack, dags_folder
from examples.demo.view import make_view
from examples.demo.word_count_demo import STREAM, LineServer, run_word_count
from rich.console import Console
from tests.system.conftest import EndStream

from headrace.devstack.stack import Stack

pytestmark = pytest.mark.timeout(1200)


def test_the_word_count_counts_every_word_once(stack: Stack, lines: LineServer, end_stream: EndStream) -> None:
    shown = io.StringIO()
    demo = DemoStack(stack.data, dags_folder(), keep=False)
    found = run_word_count(demo, make_view(Console(file=shown, width=200)), lines, rate=None)
    end_stream(STREAM)
    assert found.holds
    assert found.sent == found.counted
    assert "('row', " in shown.getvalue()
