"""Receives records from Kafka: stores them in the log and the ledger, then commits to Kafka (rule 1 of the design).

One receiver is ``KafkaReceiver -> BlockGenerator -> BlockStore`` under a ``ReceiverSupervisor``; the driver's
``ReceiverTracker`` decides which receiver reads which partition. Neither knows Spark or Airflow.
"""
