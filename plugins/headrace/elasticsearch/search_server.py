"""Recognises a search server by its answer to ``GET /``: its product, and whether headrace supports its version.

The requests that headrace sends have the same form and meaning on all supported servers. Where an answer may be of
either product (the reasons of rejections, the settings of an index), both forms are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.elasticsearch.errors import ElasticsearchRefusedError
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.transport import Transport

SUPPORTED = {"Elasticsearch": (8, 9), "OpenSearch": (2, 3)}
"""The major versions by product."""

_SUPPORTED = "Elasticsearch 8 or 9, OpenSearch 2 or 3"
# Elasticsearch's answer has it in all versions. A proxy may drop the header X-Elastic-Product.
_TAGLINE = "You Know, for Search"


@dataclass(frozen=True, slots=True)
class SearchServer:
    """Who answers. ``version`` is empty if the server does not say it."""

    product: str
    version: str

    def __str__(self) -> str:
        return f"{self.product} {self.version}".rstrip()


def ask_server(transport: Transport, retry_budget: RetryBudget, where: str) -> SearchServer | None:
    """Who the server is; None if it does not let the user ask, with 401 or 403. ``where`` is for error texts.

    To be asked before anything is written. Raises ElasticsearchRefusedError: it is another server, or of another
    version. Also raises the errors of ``request_with_retries``: a question without an answer is no answer.
    """
    response = request_with_retries(transport, retry_budget, "GET", "/")
    if response.status in (401, 403):
        return None
    parsed = response.json()
    said = parsed if isinstance(parsed, dict) else {}
    version: Any = said.get("version")
    version = version if isinstance(version, dict) else {}
    number = str(version.get("number", ""))
    if version.get("distribution") == "opensearch":
        server = SearchServer("OpenSearch", number)
    elif response.product == "Elasticsearch" or said.get("tagline") == _TAGLINE:
        server = SearchServer("Elasticsearch", number)
    else:
        named = f"it reports {version.get('distribution', 'a version')} {number}" if number else str(response.status)
        raise ElasticsearchRefusedError(
            f"The server at {where} is neither Elasticsearch nor OpenSearch, by its answer to GET /: {named}.",
            remedy="Check the address, and the path if a proxy is in front of the server. headrace supports "
            f"{_SUPPORTED}.",
        )
    major = number.partition(".")[0]
    if major.isdigit() and int(major) not in SUPPORTED[server.product]:
        raise ElasticsearchRefusedError(
            f"The server at {where} is {server}.", remedy=f"headrace supports {_SUPPORTED}."
        )
    return server
