"""One standalone cluster for all tests of this folder: xdist gives them to one of its workers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.integration.conftest import new_server_folder
from tests.support.spark_cluster import SparkCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[SparkCluster]:
    """A cluster of three workers with two cores each, on loopback, for one application at a time.

    It takes applications that have its settings: ``SPARK_CONF_DIR`` names their folder.
    """
    with (
        new_server_folder() as folder,
        SparkCluster(folder, workers=3, cores=2, memory="1g", secret=uuid.uuid4().hex) as cluster,
    ):
        yield cluster
