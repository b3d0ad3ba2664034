"""The metrics' reading of all streams on Postgres, with the counters' tests of the unit leg."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.unit.views.metrics.test_counters", "tests.unit.views.metrics.scraping")

from tests.unit.views.metrics.test_counters import *  # noqa: E402, F403
from tests.unit.views.metrics.test_counters import watched  # noqa: E402

__all__ = ["watched"]
