#!/usr/bin/env bash
# Run by Postgres' image when its data folder is new: Airflow's metadata and headrace's ledger, each with its own user.
set -euo pipefail
psql -v ON_ERROR_STOP=1 --username postgres \
  -v airflow="$AIRFLOW_DATABASE_PASSWORD" -v ledger="$LEDGER_PASSWORD" <<'SQL'
CREATE USER airflow PASSWORD :'airflow';
CREATE DATABASE airflow OWNER airflow;
-- The workers of a scheduler that was killed hold its connection, and so its lock on the run that it had in hand.
ALTER DATABASE airflow SET idle_in_transaction_session_timeout = '20s';
ALTER DATABASE airflow SET transaction_timeout = '2min';
CREATE USER headrace PASSWORD :'ledger';
CREATE DATABASE headrace OWNER headrace;
SQL
