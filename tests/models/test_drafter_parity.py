"""Every draft of the reference package, from the target's taps to the arg-max."""

import json
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.models import cache, dense, drafter
from dcut_jax.weights.dflash import load_drafter
from dcut_jax.weights.hf import load_hf

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"
LENGTH = 128  # of padded outputs


@pytest.fixture(scope="module")
def target():
    return load_hf(GOLDEN / "target", jnp.float32)


def trace(name):
    """Outputs of all prompts, and `(prompt, step)` of every step that drafted."""
    prompts = json.loads((GOLDEN / name / "trace.json").read_text())
    outputs = [p["output"] for p in prompts]
    steps = [(n, s) for n, p in enumerate(prompts) for s in p["steps"]]
    return outputs, [(n, s) for n, s in steps if len(s["block"]) > 1]


def padded(sequences):
    token_NS = np.zeros((len(sequences), LENGTH), np.int32)
    for n, tokens in enumerate(sequences):
        token_NS[n, : len(tokens)] = tokens
    return token_NS


@pytest.fixture(scope="module")
def drafts(target):
    """From a trace to `(ours, the reference's)` of every step, in any order."""
    target_cfg, target_params = target

    def run(name, shift=0, dtype=jnp.float32):
        """With taps `shift` layers late, and drafter and cache in `dtype`."""
        cfg, params = load_drafter(GOLDEN / name, dtype)
        taps = tuple(i + shift for i in cfg.target_layers)

        @jax.jit
        def read(token_NS):
            N = token_NS.shape[0]
            valid_NS = jnp.ones(token_NS.shape, bool)
            rows = dense.forward_sequences(
                target_params, target_cfg, token_NS, valid_NS, taps
            )
            position_NS = jnp.broadcast_to(jnp.arange(LENGTH)[None], (N, LENGTH))
            ctx_NSE = drafter.context(params, cfg, rows.taps)
            k, v = drafter.context_kv(params, cfg, ctx_NSE, position_NS)
            kv = cache.init_cache(cfg, N, LENGTH, dtype)
            zero_N = jnp.zeros(N, jnp.int32)
            return cache.write_rows(kv, k, v, zero_N, zero_N + LENGTH)

        @partial(jax.jit, static_argnames="width")
        def draft(kv, slot_B, anchor_B, start_B, width):
            # A slot per step: all steps of a width are one batch.
            of_steps = jax.tree.map(lambda x: x[:, slot_B], kv)
            embed_VE = target_params["embed_VE"]
            hidden_BKE = drafter.block_forward(
                params, cfg, embed_VE, anchor_B, start_B, of_steps, width
            )
            logit_BKV = dense.logits(hidden_BKE, dense.head_VE(target_params))
            return jnp.argmax(logit_BKV, -1)

        outputs, steps = trace(name)
        kv = read(padded(outputs))
        by_width = defaultdict(list)
        for n, step in steps:
            by_width[len(step["block"]) - 1].append((n, step))
        pairs = []
        for width, some in by_width.items():
            slot_B = np.array([n for n, _ in some], np.int32)
            anchor_B = np.array([s["block"][0] for _, s in some], np.int32)
            start_B = np.array([s["start"] for _, s in some], np.int32)
            got_BK = np.asarray(draft(kv, slot_B, anchor_B, start_B, width))
            theirs = [s["block"][1:] for _, s in some]
            pairs += zip(got_BK.tolist(), theirs, strict=True)
        return pairs

    return run


@pytest.mark.parametrize(("name", "blocks"), [("full", 87), ("swa", 155)])
def test_every_draft_is_the_references(drafts, name, blocks):
    pairs = drafts(name)
    assert len(pairs) == blocks
    assert [p for p in pairs if p[0] != p[1]] == []


@pytest.mark.parametrize("shift", [-1, 1], ids=["early", "late"])
@pytest.mark.parametrize("name", ["full", "swa"])
def test_taps_a_layer_off_are_noticed(drafts, name, shift):
    pairs = drafts(name, shift)
    assert sum(ours == theirs for ours, theirs in pairs) < len(pairs) / 2


def test_a_bfloat16_drafter_mostly_agrees(drafts):
    pairs = drafts("full", dtype=jnp.bfloat16)
    same = [a == b for pair in pairs for a, b in zip(*pair, strict=True)]
    assert 0.9 < np.mean(same)


@pytest.mark.parametrize("name", ["full", "swa"])
def test_the_target_judges_as_the_reference(target, name):
    cfg, params = target
    outputs, steps = trace(name)
    token_NS = padded([outputs[n][: s["start"]] + s["block"] for n, s in steps])

    @jax.jit
    def judge(token_NS):
        valid_NS = jnp.ones(token_NS.shape, bool)
        rows = dense.forward_sequences(params, cfg, token_NS, valid_NS)
        return jnp.argmax(dense.logits(rows.hidden, dense.head_VE(params)), -1)

    got_NS = np.asarray(judge(token_NS[:, :64]))
    for got_S, (_, step) in zip(got_NS, steps, strict=True):
        rows = slice(step["start"], step["start"] + len(step["block"]))
        assert got_S[rows].tolist() == step["posterior"]


@pytest.mark.parametrize("width", [0, 8])
def test_a_width_beyond_the_block_is_refused(target, width):
    cfg, params = load_drafter(GOLDEN / "full", jnp.float32)
    kv = cache.init_cache(cfg, 1, LENGTH, jnp.float32)
    one = jnp.ones(1, jnp.int32)
    embed_VE = target[1]["embed_VE"]
    with pytest.raises(ValueError, match=rf"width {width} is outside 1\.\.7"):
        drafter.block_forward(params, cfg, embed_VE, one, one, kv, width)
