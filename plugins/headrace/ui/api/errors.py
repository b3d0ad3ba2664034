"""Answers for errors: the status that fits, what happened, and what to do."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from headrace.connections import ConnectionNotFoundError
from headrace.errors import HeadraceError
from headrace.ledger.errors import (
    BatchNotFoundError,
    BatchStateError,
    LedgerConflictError,
    LedgerUnavailableError,
    LedgerUrlError,
    SchemaError,
    StreamNotFoundError,
)
from headrace.ui.api import models
from headrace.ui.api.key_searches import SearchesBusyError
from headrace.ui.api.ledgers import LedgerSilentError

_STATUSES: tuple[tuple[type[HeadraceError], int], ...] = (
    (StreamNotFoundError, 404),
    (BatchNotFoundError, 404),
    (BatchStateError, 409),
    (LedgerConflictError, 409),
    (LedgerSilentError, 503),
    (SearchesBusyError, 503),
    (LedgerUnavailableError, 503),
    (SchemaError, 503),
    (LedgerUrlError, 503),
    (ConnectionNotFoundError, 503),
)

RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"model": models.Error, "description": "Not logged in."},
    404: {"model": models.Error, "description": "There is no such stream or batch, or you may not read it."},
    503: {"model": models.Error, "description": "The stream's ledger does not answer."},
}
ACTION_RESPONSES: dict[int | str, dict[str, Any]] = {
    **RESPONSES,
    403: {"model": models.Error, "description": "You may read the stream, and not act on it."},
    409: {"model": models.Error, "description": "The action is refused; the preview says why."},
    415: {"model": models.Error, "description": "The body is not JSON."},
}


def add_error_handlers(app: FastAPI) -> None:
    """Let errors of headrace become answers. Any other error is a 500, and in the server's log."""

    @app.exception_handler(HeadraceError)
    async def answer(_request: Request, error: HeadraceError) -> JSONResponse:
        status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 502)
        again = {"Retry-After": "15"} if isinstance(error, SearchesBusyError) else None
        return JSONResponse({"detail": error.what, "remedy": error.remedy}, status_code=status, headers=again)
