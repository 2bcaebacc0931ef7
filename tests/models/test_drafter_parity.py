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


def padded(sequences, count):
    token_NS = np.zeros((count, LENGTH), np.int32)
    for n, tokens in enumerate(sequences):
        token_NS[n, : len(tokens)] = tokens
    return token_NS


# Programs are shared by all tests: compiling is nearly all that these cost.
@partial(jax.jit, static_argnames="cfg")
def read(params, cfg, token_NS):
    """Residual stream after every layer, and arg-max, of the target."""
    valid_NS = jnp.ones(token_NS.shape, bool)
    every = tuple(range(cfg.layers))
    rows = dense.forward_sequences(params, cfg, token_NS, valid_NS, every)
    argmax_NS = jnp.argmax(dense.logits(rows.hidden, dense.head_VE(params)), -1)
    return jnp.split(rows.taps, cfg.layers, axis=-1), argmax_NS


@partial(jax.jit, static_argnames="cfg")
def remember(params, cfg, taps_NSC):
    """The drafter's cache of every context row."""
    N, S, _ = taps_NSC.shape
    position_NS = jnp.broadcast_to(jnp.arange(S)[None], (N, S))
    ctx_NSE = drafter.context(params, cfg, taps_NSC)
    k, v = drafter.context_kv(params, cfg, ctx_NSE, position_NS)
    table_NN = cache.in_order(N, cache.pages_for(S))
    kv = cache.init_cache(cfg, table_NN.size, params["fc_CE"].dtype)
    slot_T, position_T = jnp.repeat(jnp.arange(N), S), position_NS.ravel()
    flat = [x.reshape(x.shape[0], N * S, *x.shape[3:]) for x in (k, v)]
    every_T = jnp.ones(N * S, bool)
    return cache.write_rows(kv, table_NN, *flat, slot_T, position_T, every_T)


@partial(jax.jit, static_argnames=("cfg", "width"))
def draft(params, cfg, target_params, kv, slot_B, anchor_B, start_B, width):
    # A slot per step: all steps of a width are one batch.
    pages = cache.pages_for(LENGTH)
    table_BN = slot_B[:, None] * pages + jnp.arange(pages)[None]
    hidden_BKE = drafter.block_forward(
        params,
        cfg,
        target_params["embed_VE"],
        anchor_B,
        start_B,
        kv,
        table_BN,
        width,
    )
    return jnp.argmax(dense.logits(hidden_BKE, dense.head_VE(target_params)), -1)


@pytest.fixture(scope="module")
def drafts(target):
    """From a trace to `(ours, the reference's)` of every step, in any order."""
    target_cfg, target_params = target

    def run(name, shift=0, dtype=jnp.float32):
        """With taps `shift` layers late, and drafter and cache in `dtype`."""
        cfg, params = load_drafter(GOLDEN / name, dtype)
        outputs, steps = trace(name)
        layers, _ = read(target_params, target_cfg, padded(outputs, 16))
        taps = [layers[i + shift] for i in cfg.target_layers]
        kv = remember(params, cfg, jnp.concatenate(taps, -1))
        by_width = defaultdict(list)
        for n, step in steps:
            by_width[len(step["block"]) - 1].append((n, step))
        pairs = []
        for width, some in by_width.items():
            slot_B = np.array([n for n, _ in some], np.int32)
            anchor_B = np.array([s["block"][0] for _, s in some], np.int32)
            start_B = np.array([s["start"] for _, s in some], np.int32)
            got_BK = draft(
                params, cfg, target_params, kv, slot_B, anchor_B, start_B, width
            )
            theirs = [s["block"][1:] for _, s in some]
            pairs += zip(np.asarray(got_BK).tolist(), theirs, strict=True)
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


@pytest.mark.slow
def test_a_bfloat16_drafter_mostly_agrees(drafts):
    pairs = drafts("full", dtype=jnp.bfloat16)
    same = [a == b for pair in pairs for a, b in zip(*pair, strict=True)]
    assert 0.9 < np.mean(same)


@pytest.mark.parametrize("name", ["full", "swa"])
def test_the_target_judges_as_the_reference(target, name):
    cfg, params = target
    outputs, steps = trace(name)
    read_so_far = [outputs[n][: s["start"]] + s["block"] for n, s in steps]
    for first in range(0, len(steps), 16):
        token_NS = padded(read_so_far[first : first + 16], 16)
        argmax_NS = np.asarray(read(params, cfg, token_NS)[1])
        for argmax_S, (_, step) in zip(argmax_NS, steps[first:], strict=False):
            rows = slice(step["start"], step["start"] + len(step["block"]))
            assert argmax_S[rows].tolist() == step["posterior"]


@pytest.mark.parametrize("width", [0, 8])
def test_a_width_beyond_the_block_is_refused(target, width):
    cfg, params = load_drafter(GOLDEN / "full", jnp.float32)
    kv = cache.init_cache(cfg, cache.pages_for(LENGTH), jnp.float32)
    one, table_1N = jnp.ones(1, jnp.int32), cache.in_order(1, kv.k.shape[1])
    embed_VE = target[1]["embed_VE"]
    with pytest.raises(ValueError, match=rf"width {width} is outside 1\.\.7"):
        drafter.block_forward(params, cfg, embed_VE, one, one, kv, table_1N, width)
