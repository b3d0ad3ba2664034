"""What every test needs before the first import of Airflow: a home of its own, never the user's."""

from __future__ import annotations

import os
import tempfile

_home = tempfile.mkdtemp(prefix="headrace-airflow-home-")
os.environ["AIRFLOW_HOME"] = _home
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ["AIRFLOW__CORE__UNIT_TEST_MODE"] = "False"
os.environ["AIRFLOW__CORE__DAGS_FOLDER"] = os.path.join(_home, "dags")  # noqa: PTH118
