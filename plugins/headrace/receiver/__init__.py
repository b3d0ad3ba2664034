"""Receiving: from Kafka into the log and the ledger, and only then a commit (rule 1 of the design).

One receiver is ``KafkaReceiver -> BlockGenerator -> BlockStore`` under a ``ReceiverSupervisor``; the driver's
``ReceiverTracker`` decides which receiver reads which partition. Neither knows Spark or Airflow.
"""
