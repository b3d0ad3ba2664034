"""Indexes rows into Elasticsearch: document ids, bulk requests, their answers, dead letters.

Imports neither Spark nor Airflow. What holds here (rules 7 and 11 of the design):

* Every input row ends as exactly one of created, updated, repeated, kept, uncompared, superseded, deleted,
  dead-lettered, ignored or dropped. If a row has none of these outcomes, the task fails and the batch is run again.
* Rows of one batch never share an id (``indexer``). An existing document is compared with the row before the row
  counts as repeated (``version_conflicts``); a document of another source fails the batch.
* Indexing the same rows again changes nothing in the index: ids are functions of the record, versions of its offset.
* Only items that Elasticsearch rejected temporarily are sent again. Only a document that is itself at fault is
  dead-lettered. Only the last answer for a row counts.

A row's path: ``columns`` (the shape) -> ``document_ids`` -> ``bulk_bodies`` (checks, NDJSON bytes) -> ``bulk_sender``
(requests, retries, bisection; ``verdicts`` reads the answers) -> ``transport`` (HTTP) -> ``dead_letters``. ``indexer``
runs these steps for one task's rows.

Everything else (aliases, privileges, dead letters that people read and replay) is ``administration``, by the same
transport.
"""
