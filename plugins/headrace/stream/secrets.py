"""Finds secrets in a definition. It must hold none: it is stored in the ledger in clear and put on command lines.

The one list of what a secret looks like: names (`HIDDEN_NAMES`), forms of values, and URLs with a login. A definition
names a secret instead: by an Airflow connection, or by a variable of the environment that the code reads.
"""

from __future__ import annotations

import json
import re
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, JsonValue

HIDDEN_NAMES = (
    r"secret|passw(?:or)?d|pass(?:phrase|code)|pwd$|(?:^|[._-])(?:pass|sig|sas)$|fs\.azure\.sas\.|credentials?$"
    r"|authorization|(?:access|account|api|private|shared)[._-]?key(?!provider|file)|(?:encryption|signing)[._-]?key$"
    r"|(?:token|signature)$|AIRFLOW_CONN_"
)
"""What is in the name of a secret, as a regular expression of Python and of Java. A keyprovider is a class and a
keyfile a path; token_url and signature_version are no secrets."""

_NAME = re.compile(rf"(?i){HIDDEN_NAMES}")
# In a URL's query and among Spark's settings, whatever is about a token or a signature is refused.
_ANYWHERE = re.compile(r"(?i)token|signature")
# On Kubernetes these name a secret of the cluster, or where one is mounted.
_REFERENCE = re.compile(r"spark\.kubernetes\.(?:driver|executor)\.(?:secretKeyRef|secrets)\.")
_CREDENTIALS_FILE = re.compile(r"(?:file:)?(?:/[\w.@-]+)+\.\w+")
# An assignment, such as a system property in extraJavaOptions or a part of a connection string. A class named
# …TokenProvider is no secret.
_ASSIGNMENT = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*["']?[^\s"']""")
# What is a secret whatever its name: a header, a key in PEM, a JSON web token, keys of AWS and GitHub. The token of a
# header is no word: it has a digit, an equals sign or a capital inside.
_VALUE = re.compile(
    r"\b(?i:bearer|basic)\s+(?=[\w+/=.-]*(?:\d|=|[a-z][A-Z]))[\w+/=.-]{6,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\."
    r"|\bA(?:KIA|SIA)[0-9A-Z]{16}\b|\bgh[pousr]_\w{20,}"
)
# An address as librdkafka accepts it: the protocol before it and the port are optional.
_SERVER = re.compile(r"(?:\w+://)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+)(?::\d{1,5})?")
_URL_LOGIN = re.compile(r"//[^/\s@:]*:[^/\s@]+@")


def url_holds_secret(url: str) -> bool:
    """Whether a URL holds a password, a login of HTTP, or an option in its query with a name like a secret's."""
    try:
        parts = urlsplit(url)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
        is_login = parts.password is not None or (parts.username is not None and parts.scheme in ("http", "https"))
        return is_login or any(_NAME.search(name) or _ANYWHERE.search(name) for name in names)
    except ValueError:  # no URL: better refused than stored
        return "@" in url


def _check_servers(value: str) -> str:
    if "@" in value:
        raise ValueError("hold a login; put it into an Airflow connection and name that in connection")
    if not all(_SERVER.fullmatch(server.strip()) for server in value.split(",")):
        raise ValueError("are not addresses; write host:9092, or several with commas")
    return value


Servers = Annotated[str, AfterValidator(_check_servers)]
"""The type of a field with Kafka's bootstrap servers: addresses without a login."""


def settings_with_secrets(settings: dict[str, str]) -> list[str]:
    """The names of the Spark settings that have a secret's name or hold a secret in their value."""
    return sorted(
        name
        for name, value in settings.items()
        if not _REFERENCE.match(name)
        and (_names_secret(name, value) or _ANYWHERE.search(name) or _is_secret(value) or _assigns_secret(value))
    )


def check_arguments(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return arguments of a class if none has a secret's name or is a URL with a login. Raises ValueError, which the
    definition's error repeats."""
    named = values_with_secrets(value)
    if named:
        raise ValueError(
            f"hold a login or a secret in {', '.join(named)}, and the definition is stored in clear; put it into "
            "an Airflow connection and name that in connection"
        )
    return value


def values_with_secrets(value: JsonValue, name: str = "") -> list[str]:
    """The paths of the texts that have a secret's name or form, or are a URL with a login, such as
    "headers.authorization"."""
    if isinstance(value, dict):
        inside = [(f"{name}.{key}" if name else key, child) for key, child in value.items()]
    elif isinstance(value, list):
        inside = [(f"{name}.{index}", child) for index, child in enumerate(value)]
    elif isinstance(value, str) and value:
        return [name] if _names_secret(name.rpartition(".")[2], value) or _is_secret(value) else []
    else:
        return []
    return [path_of_secret for path, child in inside for path_of_secret in values_with_secrets(child, path)]


def _names_secret(name: str, value: str) -> bool:
    match = _NAME.search(name)
    # Google's libraries take the path of a file in GOOGLE_APPLICATION_CREDENTIALS.
    is_path = match is not None and match[0].lower().startswith("credential") and _CREDENTIALS_FILE.fullmatch(value)
    return match is not None and not is_path


def _is_secret(value: str) -> bool:
    """Whether a text is a secret by its form, a URL with a login, or JSON with a secret in it."""
    if _VALUE.search(value) or _URL_LOGIN.search(value) or url_holds_secret(value):
        return True
    try:
        inside = json.loads(value) if value.lstrip().startswith(("{", "[")) else None
    except ValueError:
        return False
    return bool(values_with_secrets(inside))


def _assigns_secret(value: str) -> bool:
    return any(_NAME.search(name) for name in _ASSIGNMENT.findall(value))
