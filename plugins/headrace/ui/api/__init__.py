"""The REST API of headrace below Airflow's own server, and the page's files. Loaded only in the API server."""
