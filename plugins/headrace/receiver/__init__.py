"""Receives records: stores them in the log and the ledger, then commits to Kafka (rule 1 of the design).

One receiver is ``KafkaReceiver -> BlockGenerator -> BlockStore`` under a ``ReceiverSupervisor``; the driver's
``ReceiverTracker`` decides which receiver reads which partition. Neither knows Spark or Airflow. A user's `Receiver`
reads another source, as a ``CustomSource`` in the place of the ``KafkaReceiver``; `SocketText` and `TextFiles` are two.
"""

from headrace.receiver.receiver import Receiver, ReceiverStoppedError, Record
from headrace.receiver.socket_text import SocketText
from headrace.receiver.text_files import TextFiles

__all__ = ["Receiver", "ReceiverStoppedError", "Record", "SocketText", "TextFiles"]
