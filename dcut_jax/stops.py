"""Stop strings: where a text ends because of what it says."""

from collections.abc import Sequence

from dcut_jax.engine.requests import Halt
from dcut_jax.prompts import is_unicode
from dcut_jax.weights.tokenizer import TextTokenizer

_BROKEN = "\ufffd"  # how bytes are decoded that are no character, or not yet
_SLACK = 8  # characters by which a text read from its middle may differ at its ends
_BROKEN_TOKENS = 64  # after so many without a whole character, the middle is anywhere


class StopStrings:
    """Ends texts at strings; a `Request.halt`.

    A text is over with the first token by which any of the strings stands in it, be it
    in the middle of that token. Which token that is depends on the tokens before it
    alone, not on how many arrive at a time. Special tokens have no text.

    Raises:
      ValueError: there is no string, an empty one, or one with U+FFFD, which stands for
        bytes that are no character.
    """

    def __init__(self, text: TextTokenizer, strings: Sequence[str]) -> None:
        if not strings or not all(strings):
            raise ValueError(
                f"expected stop strings of at least one character, found "
                f"{list(strings)}; leave them out to decode without"
            )
        if any(_BROKEN in s or not is_unicode(s) for s in strings):
            raise ValueError(
                "expected stop strings in Unicode and without U+FFFD, which stands for "
                f"bytes that are no character; found {', '.join(map(ascii, strings))}; "
                "no text ever holds it, so leave it out"
            )
        self.text = text
        self.strings = tuple(strings)

    def __call__(self) -> Halt:
        """For one text, from its first token on."""
        return _Matcher(self.text, self.strings)

    def cut(self, text: str) -> str:
        """A decoded text up to its stop string; all of it where there is none.

        Of several strings in it the one that ends first counts, and of those that end
        together the longest.
        """
        found = [(at + len(s), at) for s in self.strings if (at := text.find(s)) >= 0]
        return text[: min(found)[1]] if found else text


class _Matcher:
    """Decodes the end of a text again with each token, and looks for the strings.

    What is decoded begins at the start of the text, or so far back that a string which
    ends in new tokens begins well behind it: a character cut in two there, or a blank
    that a decoder strips there, is never part of one. Where the end is not a whole
    character the beginning stays, because decoders that spell characters as tokens of
    a byte take a run of them for broken until it is whole. So a token costs one
    decoding of a bounded length, and now and then a second.
    """

    def __init__(self, text: TextTokenizer, strings: Sequence[str]) -> None:
        self._text = text
        self._strings = strings
        self._need = max(map(len, strings)) + _SLACK
        self._tokens: list[int] = []  # those that are decoded
        self._mark = 0  # of these, how many may go once enough text is behind them
        self._before = 0  # characters of those

    def __call__(self, token: int) -> bool:
        if not self._text.has_text(token):
            return False
        self._tokens.append(token)
        end = self._text.decode(self._tokens)
        if any(s in end for s in self._strings):
            return True
        whole = not end.endswith(_BROKEN)
        if whole or len(self._tokens) - self._mark > _BROKEN_TOKENS:
            if len(end) - self._before >= self._need:
                del self._tokens[: self._mark]
                self._mark = len(self._tokens)
                self._before = len(self._text.decode(self._tokens))
        return False
