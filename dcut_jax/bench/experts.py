"""Step time of a target with experts, against the experts that its rows open.

    python -m dcut_jax.bench.experts --target smollm2-moe

A step verifies one row of each of T requests, at the end of real texts that are cached.
The T rows are taken from one text, from a few, or from as many as there are rows, so
that they open few experts or many. Steps take turns.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dcut_jax.cli import DTYPES, positive, positives, run
from dcut_jax.config import ConfigError, ExpertsConfig, ModelConfig
from dcut_jax.cut.confidence import top1
from dcut_jax.decode.compile import compiler_options
from dcut_jax.decode.pack import layout, pack
from dcut_jax.decode.verify import verify_rows
from dcut_jax.models import dense, experts
from dcut_jax.models.cache import (
    KvCache,
    copy_pages,
    in_order,
    init_cache,
    pages_for,
    write_rows,
)
from dcut_jax.prompts import load_prompts
from dcut_jax.weights.load import SMOLLM2_MOE, load_target

CONTEXT = 47  # cached tokens of a request


@dataclass(frozen=True)
class StepRecord:
    """One kind of step.

    Attributes:
      rows: of the step, one per request.
      texts: different texts that they are from.
      distinct: experts of a layer that they open, mean over layers.
      pairs: of a row and an expert, a layer.
      median_ms, least_ms: time of a step.
    """

    rows: int
    texts: int
    distinct: float
    pairs: int
    median_ms: float
    least_ms: float


def expected_distinct(cfg: ExpertsConfig, rows: int) -> float:
    """Experts of a layer that `rows` rows open if each chooses at random."""
    return cfg.count * (1 - (1 - cfg.active / cfg.count) ** rows)


def distinct_experts(expert_YNA: Int[np.ndarray, "Y N A"]) -> float:
    """Experts that some row is sent to, mean over layers."""
    return float(np.mean([len(np.unique(layer)) for layer in expert_YNA]))


@partial(jax.jit, static_argnames="cfg")
def read_texts(
    params: Any, cfg: ModelConfig, token_BS: Int[Array, "B S"]
) -> tuple[KvCache, Int[Array, "Y B A"]]:
    """Caches of all but the last token, and the experts of the last."""
    routed: list[Array] = []

    def feed(h: Array, layer: Any, cfg: ModelConfig, valid: Array) -> Array:
        if "experts" in layer:
            assert cfg.experts is not None
            router_EQ = layer["experts"]["router_EQ"]
            routed.append(experts.route(h[:, -1], router_EQ, cfg.experts).expert_NA)
        return dense.feed_forward(h, layer, cfg, valid)[0]

    B, S = token_BS.shape
    valid_BS = jnp.ones((B, S), bool)
    rows = dense.forward_sequences(params, cfg, token_BS, valid_BS, feed=feed)
    k, v = (
        x[:, :, :-1].reshape(x.shape[0], -1, *x.shape[3:]) for x in (rows.k, rows.v)
    )
    slot_T = jnp.repeat(jnp.arange(B), S - 1)
    position_T = jnp.tile(jnp.arange(S - 1), B)
    table_BN = in_order(B, pages_for(S))
    kv = init_cache(cfg, table_BN.size, jnp.float32)
    every_T = jnp.ones(slot_T.shape, bool)
    kv = write_rows(kv, table_BN, k, v, slot_T, position_T, every_T)
    return kv, jnp.stack(routed)


def verify_step(
    params: Any,
    kv: KvCache,
    table_TN: Int[Array, "T N"],
    token_T: Int[Array, "T"],
    length_T: Int[Array, "T"],
    *,
    cfg: ModelConfig,
) -> tuple[Int[Array, "T"], Float[Array, "Y T G D"]]:
    """The target's pass over anchors alone: tokens, and what a commit would write."""
    rows = token_T.shape[0]
    packed = pack(jnp.zeros_like(token_T), jnp.ones(rows, bool), rows)
    lay = layout(rows, rows, 1)
    out = verify_rows(params, cfg, kv, table_TN, token_T, length_T, packed, lay, ())
    return top1(dense.logits(out.hidden, dense.head_VE(params))).token, out.k


def measure(
    params: Any,
    cfg: ModelConfig,
    token_BS: Int[np.ndarray, "B S"],
    row_counts: Sequence[int],
    rounds: int,
) -> list[StepRecord]:
    """Times steps of `row_counts` rows, from one text, a quarter as many, as many."""
    S = token_BS.shape[1]
    kv, expert_YBA = read_texts(params, cfg, jnp.asarray(token_BS))
    expert_YBA = np.asarray(expert_YBA)
    table_BN = in_order(len(token_BS), pages_for(S))
    calls: dict[tuple[int, int], Any] = {}
    opened: dict[tuple[int, int], float] = {}
    for T in row_counts:
        run_step = None
        for texts in sorted({1, max(T // 4, 1), T}):
            text_T = np.arange(T) % texts
            args = (
                params,
                copy_pages(kv, table_BN[text_T].ravel()),
                in_order(T, table_BN.shape[1]),
                jnp.asarray(token_BS[text_T, -1]),
                jnp.full(T, S - 1, jnp.int32),
            )
            if run_step is None:
                lowered = jax.jit(partial(verify_step, cfg=cfg)).lower(*args)
                run_step = lowered.compile(compiler_options=compiler_options())
            calls[T, texts] = partial(run_step, *args)
            opened[T, texts] = distinct_experts(expert_YBA[:, text_T])
    times: dict[tuple[int, int], list[float]] = {cell: [] for cell in calls}
    cells, rng = list(calls), np.random.default_rng(0)
    for timed in (False, *[True] * rounds):
        for i in rng.permutation(len(cells)):
            start = time.perf_counter()
            jax.block_until_ready(calls[cells[i]]())
            if timed:
                times[cells[i]].append(1e3 * (time.perf_counter() - start))
    assert cfg.experts is not None
    return [
        StepRecord(
            rows=T,
            texts=texts,
            distinct=opened[T, texts],
            pairs=T * cfg.experts.active,
            median_ms=float(np.median(found)),
            least_ms=min(found),
        )
        for (T, texts), found in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and the records as JSON in the last line."""
    p = argparse.ArgumentParser(
        prog="python -m dcut_jax.bench.experts", description=__doc__
    )
    p.add_argument("--target", default=SMOLLM2_MOE)
    p.add_argument("--rows", type=positives, default=(1, 2, 4, 8, 16, 32, 64))
    p.add_argument("--rounds", type=positive, default=9)
    p.add_argument("--dtype", default="float32", choices=DTYPES)
    args = p.parse_args(argv)
    target = load_target(args.target, jnp.dtype(args.dtype))
    cfg = target.cfg
    if cfg.experts is None:
        raise ConfigError(
            f"target {target.name} has no experts; expected one that has, such as "
            f"{SMOLLM2_MOE}"
        )
    text = target.text()
    need = max(args.rows)
    chats = [text.chat(list(m.messages)) for m in load_prompts("default", 4 * need)]
    long = [c[: CONTEXT + 1] for c in chats if len(c) > CONTEXT]
    if len(long) < need:
        raise ConfigError(f"{need} rows need as many prompts; found {len(long)}")
    records = measure(
        target.params, cfg, np.asarray(long[:need], np.int32), args.rows, args.rounds
    )
    print(
        f"{target.name}: {cfg.experts.count} experts of {cfg.experts.mlp}, "
        f"{cfg.experts.active} a row, {args.dtype}"
    )
    print("rows  texts  distinct  (at random)  ms: median  least")
    for r in records:
        at_random = expected_distinct(cfg.experts, r.texts)
        print(
            f"{r.rows:4d}  {r.texts:5d}  {r.distinct:8.1f}  {at_random:11.1f}  "
            f"{r.median_ms:10.1f}  {r.least_ms:.1f}"
        )
    print(json.dumps([asdict(r) for r in records]))
    return 0


if __name__ == "__main__":
    run(main)
