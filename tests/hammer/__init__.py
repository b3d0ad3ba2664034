"""The hammer: a stream under load on the embedded stack while its parts are killed, hung, restarted and starved.

What a stream promises is judged from outside: every record that the producer was told of against Kafka, every record
of Kafka against Elasticsearch, and `headrace fsck` over the ledger. The hammer helps in nothing: it starts servers
again as a service manager would, and presses no button of Airflow's beyond the two that let the DAGs run.
"""
