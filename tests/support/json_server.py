"""A server of a test that answers with JSON, with TLS or without."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headrace.devstack.server import LOOPBACK


class JsonHandler(BaseHTTPRequestHandler):
    """Answers requests; ``do_GET`` and ``do_POST`` say what."""

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class JsonServer:
    """Serves on the loopback until `close`. ``url``: its address."""

    def __init__(self, handler: type[JsonHandler], tls: ssl.SSLContext | None = None) -> None:
        self._server = ThreadingHTTPServer((LOOPBACK, 0), handler)
        if tls:
            # Not at the accept: a client that does not trust the server would hold it up.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'https' if tls else 'http'}://{LOOPBACK}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
