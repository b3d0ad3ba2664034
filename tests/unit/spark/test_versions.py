from __future__ import annotations

import pytest

from headrace.spark import sessions
from headrace.spark.sessions import VersionMismatchError, check_versions, current_versions


def test_equal_versions_pass() -> None:
    check_versions(current_versions())


def test_more_in_the_lease_than_we_know_passes() -> None:
    check_versions({**current_versions(), "java": "17"})


def test_every_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"python": "3.11", "pyspark": "4.2.0", "headrace": "0.1"}
    monkeypatch.setattr(sessions, "current_versions", lambda: ours)
    with pytest.raises(VersionMismatchError, match=r"python 3.9 there, 3.11 here; headrace unknown there, 0.1 here"):
        check_versions({"python": "3.9", "pyspark": "4.2.0"})
