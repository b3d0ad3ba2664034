"""Finds secrets in a definition. It must hold none: it is stored in the ledger in clear and put on command lines."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from pydantic import JsonValue

# Spark's own spark.redaction.regex, as settings that Spark hides in its user interface are visible on a command line;
# and the keys of Azure and Google accounts. A keyprovider is a class, a keyfile is a path.
_SPARK_WORDS = r"secret|password|token|access[.]?key|(?:account|private)[.]?key(?!provider|file)"
_SPARK_NAME = re.compile(rf"(?i){_SPARK_WORDS}|fs\.azure\.sas\.")
# The same as an assignment, such as a system property in extraJavaOptions; a class named …TokenProvider is no secret.
# Azure's shared access signatures have their secret in sig=.
_ASSIGNS_SECRET = re.compile(rf"(?i)(?:{_SPARK_WORDS})[\w.]*=\S|\bsig=\S")
# An address as librdkafka accepts it: the protocol before it and the port are optional.
_SERVER = re.compile(r"(?:\w+://)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+)(?::\d{1,5})?")
_URL_LOGIN = re.compile(r"//[^/\s@:]*:[^/\s@]+@")
# The name of a text in a definition, or of an option in a URL's query. As texts, token_url and signature_version are no
# secrets, and a count, such as max_tokens, is no text. In a URL, whatever is about a token or a signature is refused.
_SECRET_NAME = re.compile(
    r"(?i)secret|passw(or)?d|passphrase|(^|[._-])(pwd|sig)$|(token|signature)$|credential|authorization"
    r"|(access|account|api|private)[._-]?key"
)

_URL_WORDS = re.compile(r"(?i)token|signature")


def url_holds_secret(url: str) -> bool:
    """Whether a URL holds a password, or an option in its query with a name like a secret's."""
    try:
        parts = urlsplit(url)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
        return parts.password is not None or any(_SECRET_NAME.search(name) or _URL_WORDS.search(name) for name in names)
    except ValueError:  # no URL: better refused than stored
        return "@" in url


def check_servers(value: str | None) -> str | None:
    """Return Kafka's bootstrap servers if they are addresses without a login. Raises ValueError, which the definition's
    error repeats."""
    if value is not None and "@" in value:
        raise ValueError("hold a login; put it into an Airflow connection and name that in connection")
    if value is not None and not all(_SERVER.fullmatch(server.strip()) for server in value.split(",")):
        raise ValueError("are not addresses; write host:9092, or several with commas")
    return value


def settings_with_secrets(settings: dict[str, str]) -> list[str]:
    """The names of the Spark settings that have a secret's name or hold a secret in their value."""
    return sorted(
        name
        for name, value in settings.items()
        if _SPARK_NAME.search(name) or _ASSIGNS_SECRET.search(value) or _URL_LOGIN.search(value)
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
    """The paths of the texts that have a secret's name, or are a URL with a login, such as "headers.authorization"."""
    if isinstance(value, dict):
        inside = [(f"{name}.{key}" if name else key, each) for key, each in value.items()]
    elif isinstance(value, list):
        inside = [(f"{name}.{index}", each) for index, each in enumerate(value)]
    elif isinstance(value, str) and value:
        return [name] if _SECRET_NAME.search(name.rpartition(".")[2]) or url_holds_secret(value) else []
    else:
        return []
    return [found for path, each in inside for found in values_with_secrets(each, path)]
