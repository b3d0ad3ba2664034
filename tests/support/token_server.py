"""A server of tokens, as a company's login server gives them to programs: OAuth's client credentials."""

from __future__ import annotations

import base64
import json
import ssl
import time
from typing import Any, ClassVar
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.support.json_server import JsonHandler, JsonServer

CLIENT_ID = "token-headrace"
CLIENT_SECRET = "a secret of the client"
AUDIENCE = "kafka-brokers"
KEY_ID = "first"


class TokenServer(JsonServer):
    """Issues signed tokens to a client that has its secret (OAuth's client credentials), and says how to check them."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.life_seconds = 300.0
        self.asked: list[dict[str, str]] = []
        """The form of each request, with the header ``Authorization``."""
        super().__init__(type("_Handler", (_TokenHandler,), {"tokens": self}), tls)

    def token(self, key: Any = None, **claims: Any) -> tuple[str, float]:
        """A token and when it ends, in seconds since the epoch."""
        now = time.time()
        ends_at = now + self.life_seconds
        given = {"sub": CLIENT_ID, "iss": self.url, "aud": AUDIENCE, "scope": "kafka", "iat": now, "exp": ends_at}
        return jwt.encode({**given, **claims}, key or self.key, algorithm="RS256", headers={"kid": KEY_ID}), ends_at

    def keys(self) -> dict[str, Any]:
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        return {"keys": [{**public, "kid": KEY_ID, "use": "sig", "alg": "RS256"}]}


class _TokenHandler(JsonHandler):
    tokens: ClassVar[TokenServer]

    def do_GET(self) -> None:  # noqa: N802 - as http.server names it
        self._answer(200, self.tokens.keys())

    def do_POST(self) -> None:  # noqa: N802
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        authorization = str(self.headers["Authorization"])
        self.tokens.asked.append({name: values[0] for name, values in form.items()} | {"Authorization": authorization})
        known = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if authorization != f"Basic {known}":
            self._answer(401, {"error": "invalid_client", "error_description": "the client is not known"})
            return
        token, ends_at = self.tokens.token()
        self._answer(200, {"access_token": token, "expires_in": int(ends_at - time.time()), "token_type": "Bearer"})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        self.answer(status, json.dumps(answer).encode())
