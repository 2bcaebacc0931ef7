"""What a caller asks for, and what comes back."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "running"]


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: at least 1.
      stop: token ids that end the text; the one found is kept as the last token.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs at least one prompt token; found none")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1; found {self.max_new_tokens}"
            )


@dataclass
class Completion:
    """Tokens of one request, growing while it runs.

    Attributes:
      tokens: emitted tokens, the prompt not included.
      finish: why it ended; "running" until then.
      steps: decode steps it took part in.
      accepted: drafts the target agreed with, over all steps.
    """

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = "running"
    steps: int = 0
    accepted: int = 0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step, the anchor's included (E[L]); NaN before the first step."""
        decoded = len(self.tokens) - 1  # the first token is the prefill's
        return decoded / self.steps if self.steps else float("nan")
