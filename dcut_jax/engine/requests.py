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
      temperature, top_k, top_p, min_p, seed: see `decode.sample.Sampling`. The default
        takes the arg-max; anything else needs an engine with `sampling`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs at least one prompt token; found none")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1; found {self.max_new_tokens}"
            )
        for name, fits, wanted in (
            ("temperature", 0 <= self.temperature < float("inf"), "finite, at least 0"),
            ("top_k", 0 <= self.top_k < 2**31, "at least 0, which keeps all tokens"),
            ("stop", all(0 <= t < 2**31 for t in self.stop), "token ids"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", -(2**31) <= self.seed < 2**31, "a 32-bit integer"),
        ):
            if not fits:
                raise ValueError(
                    f"{name} must be {wanted}; found {getattr(self, name)}"
                )

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, not the most likely ones taken."""
        return self.temperature > 0


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
