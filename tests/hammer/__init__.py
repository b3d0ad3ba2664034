"""The hammer: a stream under load on the embedded stack while its parts are killed, hung, restarted and starved.

The result is judged from outside: every acknowledged record is compared with Kafka, every record of Kafka with
Elasticsearch, and `headrace streams fsck` checks the ledger. The hammer does not help the stream: it restarts servers
as a service manager would, and does nothing in Airflow except unpause the two DAGs.
"""
