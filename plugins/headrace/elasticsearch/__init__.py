"""Into Elasticsearch: document ids, bulk bodies, the bulk protocol, dead letters. Imports neither Spark nor Airflow.

What holds here (rules 7 and 11 of the design):

* Every row given in ends as exactly one of created, updated, repeated, kept, superseded, deleted, dead-lettered or
  ignored. A row that is none of these fails the task, and the batch is run again.
* Rows of one batch never share an id (``collisions``), and a document that is there is compared before it counts as a
  repetition (``conflicts``); a document of another source fails the batch.
* Giving the same rows again changes nothing in the index: ids are functions of the record, versions of its offset.
* Only the items that Elasticsearch did not take for now are sent again; only a document that is itself at
  fault is dead-lettered, and a row is judged once, by its last answer.

A row travels: ``columns`` (the shape) -> ``document_ids``, ``collisions``, ``documents`` (vectorised checks) ->
``bulk_bodies`` (NDJSON bytes) -> ``bulk_sender`` (requests, retries, bisection; ``verdicts`` reads the answers) ->
``dead_letter_writer``; ``indexer`` drives one task's rows through all of them.
"""
