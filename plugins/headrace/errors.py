"""The root of every error that headrace raises on purpose."""

from headrace.failure import Failure


class HeadraceError(Exception):
    """Something went wrong that a person can act on.

    ``what`` says what happened and where, ``remedy`` what to do about it. Both end up in task logs and on
    consoles, so neither may hold a secret. ``failure`` says what to do about it where nobody looks.
    """

    failure: Failure = Failure.PASSING

    def __init__(self, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what if remedy is None else f"{what} {remedy}")
        self.what = what
        self.remedy = remedy
