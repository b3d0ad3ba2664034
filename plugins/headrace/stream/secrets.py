"""Finds secrets in a definition. It must hold none: it is stored in the ledger in clear and put on command lines.

What a secret looks like is in ``headrace.secrets``. A definition names a secret instead: by an Airflow connection, or
by a variable of the environment that the code reads.
"""

from __future__ import annotations

import json
import re
from typing import Annotated

from pydantic import AfterValidator, JsonValue

from headrace.secrets import looks_secret, names_secret, names_secret_anywhere, without_secrets

# On Kubernetes these name a secret of the cluster, or where one is mounted.
_REFERENCE = re.compile(r"spark\.kubernetes\.(?:driver|executor)\.(?:secretKeyRef|secrets)\.")
# An assignment, such as a system property in extraJavaOptions or a part of a connection string. A class named
# …TokenProvider is no secret.
_ASSIGNMENT = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*["']?[^\s"']""")
# In any text: without blanks, so that neither DDL nor SQL is one.
_PROPERTY = re.compile(r"""(?<![\w.-])([\w.-]{1,200}+)=["']?[^\s"'=]""")
_NUMBER = re.compile(r"(?i)secret|passw|passcode|passphrase|pwd")
# An address as librdkafka accepts it: the protocol before it and the port are optional.
_SERVER = re.compile(r"(?:\w+://)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+)(?::\d{1,5})?")


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
        and (names_secret_anywhere(name, value) or _holds_secret(value) or _assigns_secret(value, _ASSIGNMENT))
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
    "headers.authorization". ``name`` is the path of ``value``; the last name in it may need the one before it, as in
    "access.key"."""
    if isinstance(value, dict):
        inside = [(f"{name}.{key}" if name else key, key, child) for key, child in value.items()]
        keys = [without_secrets(path) for path, key, _ in inside if _holds_secret(key)]
        return [*keys, *(each for path, _, child in inside for each in values_with_secrets(child, path))]
    if isinstance(value, list):
        # Each has the name of the list: "passwords" holds passwords.
        inside_list = [(f"{name}.{index}", child) for index, child in enumerate(value)]
        return [each for path, child in inside_list for each in values_with_secrets(child, path)]
    # Places in lists are no names.
    own = ".".join([part for part in name.split(".") if not part.isdigit()][-3:])
    if isinstance(value, str) and value:
        is_one = names_secret(own, value) or _holds_secret(value) or _assigns_secret(value, _PROPERTY)
        return [without_secrets(name)] if is_one else []
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [name] if is_number and _NUMBER.search(own) and names_secret(own) else []


def _holds_secret(value: str) -> bool:
    """Whether a text is a secret by its form, or JSON with a secret in it."""
    if looks_secret(value):
        return True
    try:
        inside = json.loads(value) if value.lstrip().startswith(("{", "[")) else None
    except ValueError:
        return False
    return bool(values_with_secrets(inside))


def _assigns_secret(value: str, assignment: re.Pattern[str]) -> bool:
    return any(names_secret(name) for name in assignment.findall(value))
