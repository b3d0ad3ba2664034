"""Looks at the stream as a person does, by the way that headrace's pages and commands take to the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.hammer.kinds import Words

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.views.streams import StreamSummary


@dataclass(frozen=True, slots=True)
class Shown:
    """What a person is shown of a stream: its state or an error, the reason with all details, and the remedy."""

    state: str
    reason: str
    remedy: str | None

    @classmethod
    def of(cls, summary: StreamSummary) -> Shown:
        """What a page or a command shows of the summary."""
        reason = " ".join([summary.reason, *([summary.details] if summary.details else []), *summary.also])
        return cls(summary.state.value, reason, summary.remedy)

    def names(self, words: Words) -> bool:
        """Whether it names a part by one of these words, and says what to do."""
        named = any(word.lower() in self.reason.lower() for word in words.part)
        return named and self.remedy is not None and words.remedy in self.remedy

    def __str__(self) -> str:
        return f"{self.state}: {self.reason} -> {self.remedy}"


class Onlooker:
    """Looks at the stream ``stream_name`` in the ledger at ``ledger_url``, which may lead through a link."""

    def __init__(self, ledger_url: str, stream_name: str) -> None:
        self._ledger_url = ledger_url
        self._stream_name = stream_name

    def look(self) -> Shown:
        """The stream's summary, or the error that a command would end with."""
        from headrace.ledger import Ledger
        from headrace.views.streams import default_place, summarize

        try:
            with Ledger.open(self._ledger_url, create=False) as ledger:
                row = ledger.streams.get(self._stream_name)
                summary = summarize(ledger, row, default_place(self._stream_name, self._ledger_url), {})
        except HeadraceError as error:
            return Shown("error", error.what, error.remedy)
        except Exception as error:  # not headrace's own, so that a person would see a traceback
            return Shown("traceback", f"{type(error).__name__}: {error}", None)
        return Shown.of(summary)
