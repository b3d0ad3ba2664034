#!/usr/bin/env bash
# Run by Postgres' image when its data folder is new: Airflow's metadata and headrace's ledger, each with its own user.
set -euo pipefail
psql -v ON_ERROR_STOP=1 --username postgres \
  -v airflow="$AIRFLOW_DATABASE_PASSWORD" -v ledger="$LEDGER_PASSWORD" <<'SQL'
CREATE USER airflow PASSWORD :'airflow';
CREATE DATABASE airflow OWNER airflow;
CREATE USER headrace PASSWORD :'ledger';
CREATE DATABASE headrace OWNER headrace;
SQL
