"""The one list of what a secret looks like, and the one filter that takes secrets out of foreign text.

`HIDDEN_NAMES` has the names of secrets; `looks_secret` knows their forms. Definitions and the parameters of runs are
checked by them (``headrace.stream.secrets``), and Spark hides its settings by the names. `without_secrets` is for texts
that headrace did not write: what a user's function, a library or a server says. It is applied where such a text becomes
an error of headrace's, reaches the ledger, or is logged by one of headrace's processes.

A secret without such a name or form is not found, unless it is one of a connection that this process has read.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

HIDDEN = "***"
"""What stands in the place of a secret."""


class _Compiled:
    """A regular expression that is compiled when it is first used. Every process imports this module, and few need it:
    to compile all of them takes longer than to import the rest of what a Spark worker needs."""

    def __init__(self, text: str, flags: re.RegexFlag = re.NOFLAG) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        method = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, method)
        return method


# What ends a name that has a secret's word in it, and is none: a path, a column, the name of another secret.
_ABOUT = (
    r"(?:names?|refs?|arn|path|file|files|location|column|columns|field|header|provider|manager|store|scope|backend|type"
    r"|policy|env|alias|algorithm|enabled|required|url|uri|endpoint|mode|format|version|length|count|limit|ttl|expiry)"
)
_NOT_ABOUT = rf"(?![._-]?{_ABOUT}$)"
HIDDEN_NAMES = (
    r"(?i:"
    rf"secrets?(?!ar(?:y|ies)){_NOT_ABOUT}|passw(?:or)?d{_NOT_ABOUT}|pass(?:phrase|code){_NOT_ABOUT}|pwd$|(?:^|[._-])(?:pass|pw|sig|sas|dsn)$"
    r"|fs\.azure\.sas\.|(?:^|\.)fs\.\w+\.access$|credentials?(?:[._-]?(?:json|value))?$"
    rf"|authorization{_NOT_ABOUT}|(?:access|account|api|app|application|auth|private|shared)[._-]?key"
    r"(?!provider|file|[._-](?:path|location|name|header|column|field|env|arn|ref|type|alias)$)"
    r"|(?:admin|aes|encryption|gpg|hmac|ingest|ingestion|integration|licen[cs]e|pgp|rsa|signing|ssh|storage|subscription)"
    r"[._-]?key$"
    r"|(?:token|signature)$|tokens?[._-]?(?:value|string|[0-9]+)$"
    rf"|(?:access|api|app|auth|bearer|bot|csrf|oauth|personal|refresh|security|session)[._-]?tokens?(?![a-z]){_NOT_ABOUT}"
    r"|(?:^|[._-])(?:auth|bearer|cookie)$|jaas[._-]?config$|conn(?:ection)?[._-]?str(?:ing)?s?$|web[._-]?hook(?:[._-]?(?:url|uri))?$"
    r"|AIRFLOW_CONN_)"
    r"|[a-z0-9](?:Pass|Pw|Sig|Sas|Dsn|Auth|Cookie)$"
)
"""What is in the name of a secret, as a regular expression of Python and of Java. A keyprovider is a class and a
keyfile a path; token_url, secret_name and signature_version are no secrets."""

_NAME = _Compiled(HIDDEN_NAMES)
# In a URL's query and among Spark's settings, whatever is about a token or a signature is a secret.
_ANYWHERE = _Compiled(r"(?i)token|signature")
_QUERY_KEY = _Compiled(r"(?i)^(?:key|code|sig|x-amz-credential)$")
# A key of another name is one if its value is no word.
_SOME_KEY = _Compiled(r"(?i:(?:^|[._-])key)$|[a-z0-9]Key$")
_OPAQUE = _Compiled(r"(?=[^\s]*\d)(?=[^\s]*[A-Za-z])[\w+/=.-]{20,}")
_CREDENTIALS_FILE = _Compiled(r"(?:file:)?(?:/[\w.@-]+)+\.\w+")
# Values of "auth" and the like that name a way to log in.
_WAYS = _Compiled(
    r"(?i)none|basic|digest|bearer|o(?:auth|auth2|idc)|iam|kerberos|gssapi|spnego|ntlm|plain|scram[\w-]*|saml|ldap|sasl|m?tls"
    r"|ssl|jwt|token|api_?key|aws|gcp|azure|sigv4|default|anonymous|true|false|required|optional|enabled|disabled"
)
# The beginnings of keys by who makes them: AWS, GitHub, GitLab, Slack, Google, Stripe, OpenAI, SendGrid, npm, PyPI,
# HashiCorp's Vault, Databricks, DigitalOcean, New Relic, Hugging Face, Telegram's bots.
_KEYS = (
    r"\bA(?:KIA|SIA)[0-9A-Z]{12,}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}"
    r"|\bxapp-[\w-]{10,}|\bAIza[\w-]{30,}|\bya29\.[\w.-]{10,}|\b[rs]k_(?:live|test)_\w{10,}|\bsk-[\w-]{20,}"
    r"|\bSG\.[\w-]{10,}\.[\w-]{10,}|\bnpm_\w{30,}|\bpypi-[\w-]{30,}|\bhv[sb]\.[\w-]{20,}|\bdapi[0-9a-f]{30,}|\bdop_v1_\w{30,}"
    r"|\bNRAK-\w{20,}|\bhf_[A-Za-z]{30,}|\b\d{8,10}:AA[\w-]{30,}"
)
# Addresses that are secrets themselves: who has one can post.
_WEBHOOKS = (
    r"\bhooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/|\bdiscord(?:app)?\.com/api/(?:v\d+/)?webhooks/"
    r"|\bwebhook\.office\.com/|\boutlook\.office(?:365)?\.com/webhook/|\blogic\.azure\.com[:\d]*/workflows/"
    r"|\bapi\.powerplatform\.com[:\d]*/\S*workflows/|\bchat\.googleapis\.com/v1/spaces/\S*[?&]key="
    r"|\bapi\.telegram\.org/bot|\bhooks\.zapier\.com/|\bmaker\.ifttt\.com/trigger/\S*/key/|\bwebhook\.site/"
    r"|\bevents\.pagerduty\.com/integration/|\bopen\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/"
    r"|\bqyapi\.weixin\.qq\.com/cgi-bin/webhook/|\boapi\.dingtalk\.com/robot/"
)
# The token of a header is no word: it has a digit, an equals sign or a capital inside.
_SCHEME_NAME = r"\b(?i:bearer|basic|apikey|negotiate)"
_HEADER_VALUE = r"(?=[\w+/=.~-]*(?:\d|=|[a-z][A-Z]))[\w+/=.~-]{6,}"
_JWT = r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)*"
_VALUE = _Compiled(rf"{_SCHEME_NAME}\s+{_HEADER_VALUE}|-----BEGIN [A-Z ]*PRIVATE KEY|{_JWT}|{_KEYS}|{_WEBHOOKS}")
_URL_LOGIN = _Compiled(r"//[^/\s@:]*:[^/\s@]+@")


def names_secret(name: str, value: str = "") -> bool:
    """Whether a value of this name is a secret. ``value`` may show that it is none, such as a path of credentials."""
    match = _NAME.search(name)
    if match is None:
        return _SOME_KEY.search(name) is not None and _OPAQUE.fullmatch(value) is not None
    word = match[0].lower()
    if word.endswith("auth"):
        return _WAYS.fullmatch(value) is None
    # Google's libraries take the path of a file in GOOGLE_APPLICATION_CREDENTIALS, Kafka's clients that of a key.
    is_path = word.startswith("credential") or word.endswith("key")
    return not (is_path and _CREDENTIALS_FILE.fullmatch(value))


def names_secret_anywhere(name: str, value: str = "") -> bool:
    """As `names_secret`, for the options in a URL's query and the settings of Spark."""
    return names_secret(name, value) or _ANYWHERE.search(name) is not None


def looks_secret(value: str) -> bool:
    """Whether a text is a secret by its form: a URL with a login, a key, a token, a webhook's address."""
    return bool(_VALUE.search(value) or _URL_LOGIN.search(value)) or url_holds_secret(value)


def url_holds_secret(url: str) -> bool:
    """Whether a URL holds a password, a login of HTTP, or an option in its query with a name like a secret's."""
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True)
        is_login = parts.password is not None or (parts.username is not None and parts.scheme in ("http", "https"))
        return is_login or any(names_secret_anywhere(*option) for option in options)
    except ValueError:  # no URL: better refused than stored
        return "@" in url


# Of foreign text.

# A name and what assigns its value, in JSON, Python, a URL, properties, headers, Scala's maps, and text that was quoted
# again. A name begins where no other does, so a long run of characters is read once.
_ASSIGNED = _Compiled(
    r"""(?<![\w.-])(?P<name>[\w.-]{1,200}+)(?:\\*["'])?\]?[ \t]{0,9}(?P<by>=>|->|[=:]|%3[dD])[ \t]{0,9}[\[(]?"""
)
# --password hunter2, <password>hunter2</password>, ("password", "hunter2"), and (password,hunter2) of Scala.
_PAIRED = _Compiled(
    r"""--(?P<option>[\w.-]{1,200}+)[ \t]+|<(?P<element>[\w.:-]{1,200}+)>"""
    r"""|\(\s{0,9}b?["']?(?P<first>[\w.-]{1,200}+)["']?"""
    r"""\s{0,9},\s{0,9}"""
)
_SAID = _Compiled(r"""(?i)\b(?:password|passphrase|passwd)\s+(?:is\s+)?(["'])(?P<value>.{1,500}?)\1""")
_QUOTED = _Compiled(r"""b?(?P<quote>\\*["'])""")
_BARE = _Compiled(r"""[^\s&"'<>]+""")
_SCHEME = _Compiled(r"(?i)(?:bearer|basic|apikey|token|negotiate|digest|aws4-hmac-sha256)\s+\S+")
_TO_LINE_END = _Compiled(r"(?i)(?:proxy-?)?authorization$|cookie$|jaas[._-]?config$")
_NEVER = frozenset({"", "none", "null", "nil", "true", "false", "str", "int", "bool", "bytes", HIDDEN})
_STRONG = _Compiled(r"(?i)secret|passw|passphrase|passcode|pwd|private|AIRFLOW_CONN_")
_PLAIN_WORD = _Compiled(r"[a-z]{1,15}[.,;:!?)]*|[A-Z][a-z]{0,14}[.,;:!?)]*")
_PLACEHOLDER = _Compiled(r"\$\{?\w|\{\{|%\(|<\w")
_PEM = _Compiled(r"-----BEGIN (?P<kind>[A-Z ]*PRIVATE KEY)-----.*?(?:-----END (?P=kind)-----|\Z)", re.DOTALL)
_LOGIN = _Compiled(
    r"""(?P<before>[A-Za-z][\w+.-]{0,30}://[^\s:/@"'<>]{0,200}:)(?!\d{1,5}(?:[/?#\s,]|$))[^\s"'<>]{1,500}@"""
)
_HTTP_LOGIN = _Compiled(r"""(?P<before>https?://)[^\s/@:"'<>]{1,500}@""")
_WEBHOOK_URL = _Compiled(rf"""(?P<before>{_WEBHOOKS})[^\s"'<>]*""")
_FORMS = _Compiled(rf"{_JWT}|{_KEYS}")
_HEADER_FORM = _Compiled(
    r"(?P<before>\b(?i:bearer|basic|apikey|negotiate)\s+)(?=[\w+/=.~-]*(?:\d|=|[a-z][A-Z]))[\w+/=.~-]{6,}"
)

_LEAST_KNOWN = 6
_WORD = _Compiled(r"[a-z]{1,11}|[A-Z]{1,11}")
_known: set[str] = set()


def remember(values: Iterable[object]) -> None:
    """Let `without_secrets` hide these values, which a connection has as its secrets, wherever they stand.

    Words are left out: "airflow" as a password of a test would make every text unreadable.
    """
    for value in values:
        if isinstance(value, str) and len(value) >= _LEAST_KNOWN and not _WORD.fullmatch(value):
            _known.update({value, quote(value, safe="")})


def secrets_in(settings: Any) -> Iterator[str]:
    """The texts in JSON-like settings whose name is a secret's; those in a text that is JSON too."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            if isinstance(value, str) and names_secret(str(name), value):
                yield value
            yield from secrets_in(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from secrets_in(value)
    elif isinstance(settings, str):
        if settings.lstrip().startswith(("{", "[")):
            try:
                yield from secrets_in(json.loads(settings))
            except ValueError:
                return
        for start, end in _assigned(settings):
            yield settings[start:end]


def basic_login(login: str | None, password: str | None) -> str:
    """What a header for HTTP's basic log-in has of them."""
    return base64.b64encode(f"{login or ''}:{password or ''}".encode()).decode()


def without_secrets(text: str) -> str:
    """The text with every secret in it that is known, or has a secret's name or form, replaced by ``***``."""
    if not text:
        return text
    for value in sorted(_known, key=len, reverse=True):
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text)
    text = _PEM.sub(HIDDEN, text)
    text = _WEBHOOK_URL.sub(rf"\g<before>{HIDDEN}", text)
    if "://" in text:
        text = _LOGIN.sub(rf"\g<before>{HIDDEN}@", text)
        text = _HTTP_LOGIN.sub(rf"\g<before>{HIDDEN}@", text)
    text = _HEADER_FORM.sub(rf"\g<before>{HIDDEN}", text)
    text = _FORMS.sub(HIDDEN, text)
    text = _SAID.sub(lambda match: match[0].replace(match["value"], HIDDEN), text)
    parts, done = [], 0
    for start, end in _assigned(text):
        if start >= done:
            parts += [text[done:start], HIDDEN]
            done = end
    return "".join([*parts, text[done:]])


def _assigned(text: str) -> list[tuple[int, int]]:
    """Where the values stand that are assigned to the name of a secret, in their order."""
    found: list[tuple[int, int]] = []
    done = 0
    for match in _ASSIGNED.finditer(text):
        name, at = match["name"], match.end()
        in_query = match.start() > 0 and text[match.start() - 1] in "?&"
        before = re.search(r"([A-Za-z]{3,20}) $", text[max(0, match.start() - 22) : match.start()])
        names = [name, *([f"{before[1]}_{name}"] if before and name.isalpha() else [])]
        by_query = in_query and (_ANYWHERE.search(name) or _QUERY_KEY.match(name))
        # Most names are none of a secret, and values may be long: they are not looked for.
        if match.start() < done or not (
            by_query or any(_NAME.search(each) or _SOME_KEY.search(each) for each in names)
        ):
            continue
        end = _end_of_value(text, at, name)
        value = text[at:end].strip("\\\"'")
        if not (by_query or any(names_secret(each, value) for each in names)):
            continue
        is_weak = match["by"] == ":" and _QUOTED.match(text, at) is None and not any(map(_STRONG.search, names))
        if not _says_nothing(value) and not (is_weak and _PLAIN_WORD.fullmatch(value)):
            found.append(_inside(text, at, end))
            done = end
    done = 0
    for match in _PAIRED.finditer(text):
        name = (match["option"] or match["element"] or match["first"]).rpartition(":")[2]
        if match.start() >= done and _NAME.search(name):
            end = _end_of_value(text, match.end(), "")
            value = text[match.end() : end].strip("\\\"'")
            if names_secret(name, value) and not _says_nothing(value):
                found.append(_inside(text, match.end(), end))
                done = end
    return sorted(found)


def _says_nothing(value: str) -> bool:
    """Whether what is assigned is no value: nothing, a variable, or hidden already."""
    return value.lower() in _NEVER or _PLACEHOLDER.match(value) is not None


def _end_of_value(text: str, at: int, name: str) -> int:
    """Where the value ends that begins there: its closing quote, the end of a word, or of the line."""
    quoted = _QUOTED.match(text, at)
    if quoted is not None:
        closing = text.find(quoted["quote"], quoted.end())
        while closing > 0 and text[closing - 1] == "\\" and not quoted["quote"].startswith("\\"):
            closing = text.find(quoted["quote"], closing + 1)
        line = text.find("\n", at)
        return closing if closing >= 0 else (line if line >= 0 else len(text))
    if _TO_LINE_END.search(name):
        bare = _Compiled(r"""[^\n"'\]})]+""").match(text, at)
    else:
        bare = _SCHEME.match(text, at) or _BARE.match(text, at)
    return at if bare is None else bare.end()


def _inside(text: str, start: int, end: int) -> tuple[int, int]:
    quoted = _QUOTED.match(text, start)
    return (start if quoted is None else min(quoted.end(), end)), end


def clean_handled() -> None:
    """Take the secrets out of the error that is being handled, and of its causes: a traceback shows them too.

    Only texts among an error's arguments can be replaced. Who makes an error from one with a text of another kind, or
    whose code may be a secret, raises it ``from None``.
    """
    seen: set[int] = set()
    error = sys.exception()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(isinstance(argument, str) for argument in error.args):
            cleaned = tuple(without_secrets(each) if isinstance(each, str) else each for each in error.args)
            if cleaned != error.args:
                error.args = cleaned
        error = error.__cause__ or error.__context__


class CleanFormatter(logging.Formatter):
    """Formats the records of a process's log, with tracebacks, without the secrets in them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of the record."""
        return without_secrets(super().format(record))


def log_to(stream: Any = None, *, format_: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
    """Log from the level INFO on, to stderr unless another stream is given, as ``logging.basicConfig`` does."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(CleanFormatter(format_))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
