"""Decodes with an exported drafter's files alone: is the text the target's own?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcut_jax.bench.records import TextCheck
from dcut_jax.bench.report import render_checks
from dcut_jax.bench.runner import FIXED, NEAR_TIE, Texts, logit_gap, wrong_arms
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import load_pair
from dcut_jax.engine.policy import ArPolicy, FixedPolicy, Policy
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.prompts import DEFAULT, load_prompts
from dcut_jax.train.candidates import Candidate, check_made_for
from dcut_jax.weights.load import Target

PROMPTS = 10
NEW_TOKENS = 64  # as many as the bench decodes
RANDOM_LENGTH = 16
# Texts are compared where rounding cannot excuse a difference. The drafter is read as
# it was written and as it will be served.
DTYPE, DRAFT_DTYPE = "float32", "bfloat16"


@dataclass(frozen=True)
class Checked:
    """What an exported drafter decodes, all drafts of its block verified.

    Attributes:
      prompts: where they are from, for people.
      mean_accepted_length: tokens committed per request and step, E[L]; the anchor's
        own is one of them, a prompt's first token, which no step made, is not. NaN if
        every text ended at that.
      texts: how its texts compare with AR's.
    """

    prompts: str
    mean_accepted_length: float
    texts: TextCheck

    @property
    def wrong(self) -> bool:
        """Whether a text leaves AR's where the target's logits are no near-tie."""
        return bool(wrong_arms([self.texts], NEAR_TIE[DTYPE]))

    def __str__(self) -> str:
        return (
            f"{render_checks([self.texts])}\n"
            f"{len(self.texts.differences)} of {self.texts.prompts} texts differ, mean "
            f"accepted length {self.mean_accepted_length:.2f} tokens a step, on "
            f"{self.prompts}"
        )


def check(
    drafter: str | Path,
    target: str,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Checked:
    """Decodes ten prompts with an exported drafter and compares the texts with AR's.

    Greedy, up to 64 new tokens each, all prompts together; the target is in float32,
    the drafter in bfloat16. The prompts are the first of the default mix.

    Args:
      drafter: directory in the published layout; nothing else is read of the run.
      target: as `weights.load.load_target` takes it. One without a tokenizer gets
        random token ids, always the same: texts must be equal on these too, but what
        is accepted on them says little of real text.
      on_progress: called with finished texts, of `2 * PROMPTS`.

    Raises:
      CheckpointError: there is no such target or drafter, or its files are broken.
      ConfigError: the drafter is of another kind, or was made for another target.
    """
    pair = load_pair(target, str(drafter), DTYPE, DRAFT_DTYPE)
    check_made_for(Candidate(Path(drafter), Path(drafter).name, None), pair)
    assert pair.models.drafter is not None, "a directory was named"
    prompts, source = _prompts(pair.target)
    stop = pair.target.text().eos_ids if pair.target.tokenizer else ()
    requests = [Request(ids, NEW_TOKENS, stop) for ids in prompts]

    def decode(models: Models, policy: Policy, before: int) -> list[Completion]:
        longest = max(map(len, prompts)) + NEW_TOKENS
        config = EngineConfig(len(requests), longest, max(len(stop), 1))
        compiler = Compiler(models, config.cache_dtype)
        engine = Engine(models, config, policy, compiler=compiler)
        completions = engine.generate(
            requests,
            on_progress=lambda done, _: on_progress and on_progress(before + done),
        )
        engine.free()
        return completions

    plain, width = pair.without_drafter(), pair.models.drafter.max_drafts
    texts = Texts(decode(plain, ArPolicy(), 0))
    found = decode(pair.models, FixedPolicy(width), PROMPTS)
    for i, completion in enumerate(found):
        texts.check(f"{FIXED}{width}", len(found), i, completion.tokens, finished=True)
    (compared,) = texts.results(lambda d: logit_gap(plain, prompts[d.prompt], texts, d))
    steps = sum(c.steps for c in found)
    decoded = sum(len(c.tokens) - 1 for c in found)
    return Checked(source, decoded / steps if steps else float("nan"), compared)


def _prompts(target: Target) -> tuple[Sequence[tuple[int, ...]], str]:
    """Token ids of ten prompts, and where they are from."""
    if target.tokenizer is None:
        shape = PROMPTS, RANDOM_LENGTH
        ids = np.random.default_rng(0).integers(0, target.cfg.vocab, shape)
        return [tuple(row) for row in ids.tolist()], (
            f"random token ids: {target.name} has no tokenizer, so this length says "
            f"little of real text"
        )
    text = target.text()
    some = load_prompts(DEFAULT, PROMPTS)
    chats = [tuple(text.chat(list(p.messages))) for p in some]
    return chats, f"{PROMPTS} prompts of the default mix"
