"""SmolLM2 cut into experts: with all of them on it is SmolLM2; it loads by name."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models import dense
from dcut_jax.prompts import load_prompts
from dcut_jax.weights.load import (
    SMOLLM2,
    SMOLLM2_MOE,
    checkpoints_directory,
    load_target,
)
from dcut_jax.weights.split import cut, load_split

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    return load_target(SMOLLM2, "float32")


@pytest.fixture(scope="module")
def tokens(smollm2):
    text = smollm2.text()
    chats = [text.chat(list(p.messages))[:64] for p in load_prompts("gsm8k", 4)]
    return jnp.asarray([c for c in chats if len(c) == 64], jnp.int32)


def logits(cfg, params, token_NS):
    @jax.jit
    def run(params, token_NS):
        rows = dense.forward_sequences(
            params, cfg, token_NS, jnp.ones(token_NS.shape, bool)
        )
        return dense.logits(rows.hidden, dense.head_VE(params))

    return np.asarray(run(params, token_NS))


def test_with_all_experts_and_its_own_norms_it_is_smollm2(smollm2, tokens):
    directory = checkpoints_directory() / "smollm2-135m-moe"
    experts, split = load_split(directory, smollm2.cfg, smollm2.identity)
    layers = smollm2.params["layers"]
    split = replace(
        split,
        attention_norm_YE=np.stack([x["attention_norm_E"] for x in layers]),
        mlp_norm_YE=np.stack([x["mlp_norm_E"] for x in layers]),
        norm_E=np.asarray(smollm2.params["norm_E"]),
    )
    every = replace(experts, active=experts.count)
    whole = cut(smollm2.cfg, smollm2.params, every, split)
    want = logits(smollm2.cfg, smollm2.params, tokens)
    np.testing.assert_allclose(logits(*whole, tokens), want, rtol=0, atol=1e-2)


def test_the_shipped_split_agrees_mostly_with_smollm2(smollm2, tokens):
    moe = load_target(SMOLLM2_MOE, "float32")
    assert moe.cfg.experts.active < moe.cfg.experts.count
    got = logits(moe.cfg, moe.params, tokens).argmax(-1)
    same = np.mean(got == logits(smollm2.cfg, smollm2.params, tokens).argmax(-1))
    assert 0.5 < same < 1
