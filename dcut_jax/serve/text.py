"""Text of tokens as they come: never a part of a character, nor of a stop string."""

from collections.abc import Sequence

from dcut_jax.stops import StopStrings
from dcut_jax.weights.tokenizer import TextTokenizer

_BROKEN = "\ufffd"  # how bytes are decoded that are no character, or not yet
_KEPT = 32  # characters that stay decoded again, so that a decoder sees what it follows


class TextStream:
    """Turns the tokens of one text into pieces that join to `decode` of them all.

    What may still change is held back: the end of a text that is no whole character
    yet, and what a stop string may begin with. A token costs one decoding of a bounded
    length, as long as characters become whole.

    Args:
      stops: what the engine ends this text by; None for nothing.
    """

    def __init__(self, text: TextTokenizer, stops: StopStrings | None = None) -> None:
        self._text = text
        self._strings: Sequence[str] = stops.strings if stops else ()
        self._stops = stops
        self._all: list[int] = []
        # As in `stops`: what is decoded begins far enough back, at a whole character.
        self._recent: list[int] = []
        self._mark = 0  # of these, how many may go once enough text is behind them
        self._before = 0  # characters of those
        self._shown = 0  # characters that were handed out, or are held
        self._sent = 0  # characters that were handed out, from the start
        self._held = ""  # whole characters that may be part of a stop string

    def add(self, token: int) -> str:
        """The text that is certain with this token and was not before."""
        self._all.append(token)
        if not self._text.has_text(token):
            return ""
        self._recent.append(token)
        end = self._text.decode(self._recent)
        if end.endswith(_BROKEN) or self._text.spells_byte(token):
            return ""
        fresh, self._shown = end[self._shown :], len(end)
        if len(end) - self._before >= _KEPT:
            del self._recent[: self._mark]
            self._mark = len(self._recent)
            self._before = self._shown = len(self._text.decode(self._recent))
        return self._certain(fresh)

    @property
    def length(self) -> int:
        """Whole characters so far, those that are held back among them."""
        return self._sent + len(self._held)

    def _certain(self, fresh: str) -> str:
        text = self._held + fresh
        out = self._stops.cut(text) if self._stops else text
        if len(out) == len(text):
            keep = max((_overlap(text, s) for s in self._strings), default=0)
            out = text[: len(text) - keep]
        self._held = text[len(out) :]
        self._sent += len(out)
        return out

    def end(self) -> str:
        """What is left when no token comes any more."""
        rest = self.whole()[self._sent :]
        self._sent += len(rest)
        return rest

    def whole(self) -> str:
        """The text of all tokens so far, up to a stop string."""
        text = self._text.decode(self._all)
        return self._stops.cut(text) if self._stops else text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with, or is."""
    longest = min(len(text), len(string))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
