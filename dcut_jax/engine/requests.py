"""What a caller asks for, and what comes back."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "failed", "running"]

# How a token came: the target's own with nothing drafted, a draft that it agreed with,
# or its own token after the drafts of a step.
Origin = Literal["plain", "draft", "bonus"]

# Tokens and the logs of their probabilities, the most likely first.
Likeliest = tuple[tuple[int, float], ...]

# Told each token of one text, in order; says whether the text is over with this one.
Halt = Callable[[int], bool]


def halted_after(halt: Halt, tokens: Iterable[int]) -> int | None:
    """How many of these further tokens `halt` lets pass; None where it does not end.

    It is told no token behind the one that ends the text.
    """
    return next((n for n, token in enumerate(tokens, 1) if halt(token)), None)


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: at least 1.
      stop: token ids that end the text; the one found is kept as the last token.
      halt: makes what ends this text on the host, anew for each decoding of it; the
        token it ends with is kept as the last. `stops.StopStrings` is one.
      temperature, top_k, top_p, min_p, seed: see `decode.sample.Sampling`. The default
        takes the arg-max; anything else needs an engine with `sampling`.
      priority: what a token of this request is worth beside those of others, above 0.
        Only D-Cut heeds it.
      tpot_ms: longest time a token may take, ms; D-Cut takes no step that is longer, at
        the machine's present speed, while a shorter one exists. Catching up after plain
        steps comes on top, once in 32 of them.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    halt: Callable[[], Halt] | None = None
    priority: float = 1.0
    tpot_ms: float = math.inf

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
            ("priority", 0 < self.priority < math.inf, "finite and above 0"),
            ("tpot_ms", self.tpot_ms > 0, "above 0"),
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
      finish: why it ended; "running" until then. "failed": the target's logits were not
        finite, so there is no next token.
      steps: decode steps it took part in.
      accepted: drafts the target agreed with, over all steps.
      verified: drafts the target checked, over all steps.
      origins: how each token came.
      logprobs: for each token the log of its probability, in the target's own
        distribution before temperature and cuts; empty without `EngineConfig.logprobs`.
      likeliest: for each token the most likely ones in its place; empty without
        `EngineConfig.likeliest`.
    """

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = "running"
    steps: int = 0
    accepted: int = 0
    verified: int = 0
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step, the anchor's included (E[L]); NaN before the first step."""
        decoded = len(self.tokens) - 1  # the first token is the prefill's
        return decoded / self.steps if self.steps else float("nan")
