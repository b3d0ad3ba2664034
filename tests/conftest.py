"""What every test gets, wherever it stands."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Set, it has every child process compile its imports again: 3 s instead of 1 s for each start of pyspark.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No deadline, and no check of how fast examples are made: neither may depend on the machine.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=30, **_ANY_SPEED)
settings.register_profile("thorough", max_examples=1000, **_ANY_SPEED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
