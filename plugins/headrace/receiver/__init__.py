"""Receives records: stores them in the log and the ledger, then commits to Kafka (rule 1 of the design).

One receiver is ``KafkaReceiver -> BlockGenerator -> BlockStore`` under a ``ReceiverSupervisor``; the driver's
``ReceiverTracker`` decides which receiver reads which partition. Neither knows Spark or Airflow. A user's `Receiver`
reads another source, as a ``CustomSource`` in the place of the ``KafkaReceiver``.
"""

from headrace.receiver.receiver import Receiver, ReceiverStoppedError, Record

__all__ = ["Receiver", "ReceiverStoppedError", "Record"]
