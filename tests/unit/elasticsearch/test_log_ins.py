"""How a connection reaches a server: what arrives at a small HTTP server on loopback, behind it an index in memory."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch

from headrace.connections import Connection
from headrace.elasticsearch import aws_signature
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.errors import ElasticsearchRefusedError, IndexingOptionsError
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, NoAnswerError, Node

DOCS = Path(__file__).resolve().parents[3] / "docs" / "outputs.md"


@dataclass(frozen=True)
class Arrived:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """Answers requests whose target begins with the server's prefix, and no others."""

    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.arrived.append(Arrived(self.command, self.path, headers, body))
        if self.command == "CONNECT":
            self.send_error(403)
            return
        status, answer = 404, b"nothing here"
        if self.path.startswith(self.server.prefix):
            response = self.server.fake.request(self.command, self.path.removeprefix(self.server.prefix), body)
            status, answer = response.status, response.body
        self.send_response(status)
        if status != 404:
            self.send_header("x-elastic-product", "Elasticsearch")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_PUT = do_CONNECT = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fake = FakeElasticsearch()
        self.fake.indices["clicks"] = {}
        self.prefix = ""
        self.arrived: list[Arrived] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def cluster(host: str | None = None, *, login: str | None = None, password: str | None = None, **extra: Any) -> Cluster:
    return Cluster.from_connection(Connection("es", "elasticsearch", host, None, login, password, None, extra))


def find_index(made: Cluster) -> Any:
    with Administration.of(made, timeout_seconds=10, max_retry_seconds=0) as administration:
        return administration.concrete_index("clicks")


def cloud_id(text: str) -> str:
    return f"shop:{base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("eu-west-1.aws.found.io$abc$def", Node("https", "abc.eu-west-1.aws.found.io", 443)),
        ("eu-west-1.aws.found.io:9243$abc$", Node("https", "abc.eu-west-1.aws.found.io", 9243)),
    ],
)
def test_a_cloud_id_names_the_host(text: str, node: Node) -> None:
    made = cluster(cloud_id=cloud_id(text), api_key="id:key")
    assert made.nodes == (node,)
    assert made.authorization is not None


@pytest.mark.parametrize("wrong", ["shop:???", cloud_id("no dollar"), cloud_id("host:port$abc"), cloud_id("$abc")])
def test_what_is_no_cloud_id_is_refused(wrong: str) -> None:
    with pytest.raises(IndexingOptionsError, match="not an id of Elastic Cloud"):
        cluster(cloud_id=wrong)


def test_a_cloud_id_and_a_host_are_refused_together() -> None:
    with pytest.raises(IndexingOptionsError, match="a host and a cloud_id"):
        cluster("other", cloud_id=cloud_id("found.io$abc"))


@pytest.mark.parametrize("where", ["in the host", "in the extra"])
def test_a_server_is_reached_below_the_path_of_its_proxy(server: Server, where: str) -> None:
    server.prefix = "/search/eu"
    if where == "in the host":
        made = cluster(f"http://{server.address}/search/eu/")
    else:
        made = cluster(server.address, path_prefix="/search/eu")
    assert find_index(made).name == "clicks"
    assert [arrived.target.partition("?")[0] for arrived in server.arrived] == ["/search/eu/", "/search/eu/clicks"]


def test_a_server_whose_path_is_missing_is_refused_with_a_remedy(server: Server) -> None:
    """The remedy is that path."""
    server.prefix = "/search"
    with pytest.raises(ElasticsearchRefusedError, match=r"answer to GET /: 404.*the path if a proxy is in front"):
        find_index(cluster(server.address))


def test_http_requests_go_through_the_proxy_with_its_login(server: Server) -> None:
    server.prefix = "http://search.invalid:9200"
    made = cluster("search.invalid:9200", login="me", password="es-secret", proxy=f"http://joe:p%40ss@{server.address}")
    assert find_index(made).name == "clicks"
    for arrived in server.arrived:
        assert arrived.headers["proxy-authorization"] == f"Basic {base64.b64encode(b'joe:p@ss').decode()}"
        assert arrived.headers["host"] == "search.invalid:9200"
    assert "p%40ss" not in repr(made)


def test_https_requests_show_the_proxy_nothing_but_a_tunnel(server: Server) -> None:
    made = cluster(
        "https://search.invalid:9243", login="me", password="es-secret", proxy=f"http://joe:pass@{server.address}"
    )
    transport = ElasticsearchTransport(made, connections=1, timeout_seconds=10)
    with pytest.raises(NoAnswerError, match="403") as refused:
        transport.request("GET", "/clicks")
    transport.close()
    (arrived,) = server.arrived
    assert (arrived.method, arrived.target) == ("CONNECT", "search.invalid:9243")
    assert arrived.headers["proxy-authorization"] == f"Basic {base64.b64encode(b'joe:pass').decode()}"
    assert "authorization" not in arrived.headers
    assert "pass" not in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "error_text"),
    [
        ({"proxy": "proxy:3128"}, "'proxy' in the extra of connection 'es' is not an http or https URL"),
        ({"proxy": "http://proxy:3128", "ssl_assert_fingerprint": "ab" * 32}, "a proxy and ssl_assert_fingerprint"),
        ({"aws_profile": "ingest"}, "has aws_profile and no aws_region"),
        ({"aws_region": "eu-central-1", "api_key": "k"}, "has aws_region and api_key"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(extra: dict[str, Any], error_text: str) -> None:
    with pytest.raises(IndexingOptionsError, match=error_text):
        cluster("search:9200", **extra)


def test_half_of_the_aws_keys_is_refused() -> None:
    with pytest.raises(IndexingOptionsError, match="neither both keys nor none"):
        cluster("search:9200", login="AKID", aws_region="eu-central-1")


@pytest.mark.parametrize("token", [None, "a-session-token"])
@pytest.mark.parametrize("compress", [False, True])
def test_what_arrives_has_the_signature_that_botocore_makes(server: Server, token: str | None, compress: bool) -> None:
    pytest.importorskip("botocore", reason="the extra aws is not installed")
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    keys = {"login": "AKIDEXAMPLE", "password": "aws-secret"}
    extra = {"aws_region": "eu-central-1", "aws_session_token": token, "http_compress": compress}
    made = cluster(server.address, **keys, **extra)
    assert "aws-secret" not in repr(made)
    transport = ElasticsearchTransport(made, connections=1, timeout_seconds=10)
    transport.request("GET", "/clicks?filter_path=b,*.a")
    transport.request("PUT", "/a%2Bb/_doc/c%20d", b'{"n": 1}')
    transport.close()
    assert [arrived.method for arrived in server.arrived] == ["GET", "PUT"]
    for arrived in server.arrived:
        date = arrived.headers["x-amz-date"]
        url = f"http://{arrived.headers['host']}{arrived.target}"
        request = AWSRequest(arrived.method, url, data=arrived.body, headers={"X-Amz-Date": date})
        if token:
            request.headers["X-Amz-Security-Token"] = arrived.headers["x-amz-security-token"]
        request.context["timestamp"] = date
        signer = SigV4Auth(Credentials("AKIDEXAMPLE", "aws-secret", token), "es", "eu-central-1")
        signature = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
        assert arrived.headers["authorization"].endswith(f", Signature={signature}")
        assert f"AKIDEXAMPLE/{date[:8]}/eu-central-1/es/aws4_request" in arrived.headers["authorization"]


def test_aws_keys_are_found_where_botocore_looks_for_them(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore", reason="the extra aws is not installed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFHOST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret")
    assert find_index(cluster(server.address, aws_region="us-east-1")).name == "clicks"
    assert "Credential=AKIDOFHOST/" in server.arrived[-1].headers["authorization"]
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(IndexingOptionsError, match="botocore cannot look for AWS keys"):
        find_index(cluster(server.address, aws_region="us-east-1"))


@pytest.mark.parametrize("hangs", [True, False])
def test_aws_keys_that_cannot_be_renewed_are_a_silent_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Temporary keys without a renewal are treated as a server that does not answer."""
    pytest.importorskip("botocore", reason="the extra aws is not installed")
    from botocore.credentials import Credentials
    from botocore.exceptions import ConnectTimeoutError

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFHOST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret")
    monkeypatch.setattr(aws_signature, "_SECONDS", 0.2 if hangs else 30.0)
    stopped = threading.Event()

    def renew(_: Any) -> None:
        stopped.wait(60 if hangs else 0)
        raise ConnectTimeoutError(endpoint_url="https://sts.example")

    transport = ElasticsearchTransport(
        cluster(server.address, aws_region="us-east-1"), connections=1, timeout_seconds=5
    )
    # As those have that a role gives.
    monkeypatch.setattr(Credentials, "refresh_needed", lambda _: True, raising=False)
    monkeypatch.setattr(Credentials, "get_frozen_credentials", renew)
    with pytest.raises(NoAnswerError, match=r"AWS keys were not renewed: .*(did not end within|Connect timeout)"):
        transport.request("GET", "/")
    stopped.set()


def test_the_connections_of_the_documentation_are_accepted() -> None:
    section = DOCS.read_text().partition("### Connections to a search server")[2].partition("\n## ")[0]
    examples = [json.loads(text) for text in re.findall(r"AIRFLOW_CONN_\w+='([^']+)'", section)]
    made = [Cluster.from_connection(Connection("docs", example.pop("conn_type"), **example)) for example in examples]
    assert len(made) == 8
    assert {name for example in examples for name in example.get("extra", {})} >= {"cloud_id", "proxy", "aws_region"}
