"""How operators, sensors and triggers wait: the poll interval, and whether to wait in the triggerer.

Airflow's configuration gives the defaults of both.
"""

from __future__ import annotations

from airflow.configuration import conf

from headrace.errors import HeadraceError


class PollIntervalError(HeadraceError):
    """``[headrace] poll_interval`` is not a positive number of seconds."""


def poll_seconds(given: float | None = None, *, otherwise: float = 1.0) -> float:
    """Seconds between two polls of the ledger: ``given``, else ``[headrace] poll_interval``, else ``otherwise``.

    Raises:
        PollIntervalError: the setting is not a positive number.
    """
    if given is not None:
        return given
    setting = conf.get("headrace", "poll_interval", fallback=None)
    if not setting:
        return otherwise
    try:
        seconds = float(setting)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PollIntervalError(
            f"[headrace] poll_interval is {setting!r}, which is no positive number of seconds.",
            remedy="Set AIRFLOW__HEADRACE__POLL_INTERVAL to seconds, 1.0 for instance, or leave it out.",
        )
    return seconds


def in_triggerer(deferrable: bool | None) -> bool:
    """Whether to wait deferred: ``deferrable``, else ``[operators] default_deferrable``."""
    if deferrable is not None:
        return deferrable
    return conf.getboolean("operators", "default_deferrable", fallback=False)
