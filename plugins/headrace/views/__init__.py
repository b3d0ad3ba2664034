"""What the page, the API, the commands and the metrics show, from the ledger. Imports no Airflow."""
