"""The base class of every error that headrace raises on purpose."""

from headrace.failure import Failure


class HeadraceError(Exception):
    """Something went wrong that a person can act on.

    ``what`` says what happened and where, ``remedy`` what to do about it. Both appear in task logs and on consoles, so
    neither may hold a secret. ``failure`` determines whether a failed attempt is retried automatically.
    """

    failure: Failure = Failure.PASSING

    def __init__(self, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what if remedy is None else f"{what} {remedy}")
        self.what = what
        self.remedy = remedy
