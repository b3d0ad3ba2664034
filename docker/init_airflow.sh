#!/usr/bin/env bash
# Once before Airflow's components: both databases' schemas, and the password of Airflow's one user.
set -euo pipefail
umask 077
python3 - <<'PYTHON'
import json, os, pathlib
path = pathlib.Path(os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"])
path.write_text(json.dumps({"admin": os.environ["AIRFLOW_ADMIN_PASSWORD"]}))
PYTHON
headrace ledger migrate
exec airflow db migrate
