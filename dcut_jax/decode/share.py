"""A decode step that takes a chunk of a prompt along."""

from typing import Any

from jaxtyping import Array

from dcut_jax.decode.pack import Layout
from dcut_jax.decode.sample import Sampling
from dcut_jax.decode.state import DecodeState
from dcut_jax.decode.steps import (
    Caches,
    Chosen,
    Fresh,
    Models,
    ask,
    settle,
    settle_chunk,
)
from dcut_jax.decode.verify import prompt_part, rows_together, slots_part
from dcut_jax.models.cache import KvCache
from pallas_kernels.backends import PLAIN, Backends


def share(
    params: dict[str, Any],
    kv: KvCache,
    state: DecodeState,
    token_BK: Array,
    keep_B: Array,
    one: Caches,
    token_P: Array,
    length: Array,
    count: Array,
    sampling: Sampling | None,
    *,
    models: Models,
    lay: Layout,
    wire_width: int,
    logprobs: int = 0,
    backends: Backends = PLAIN,
) -> tuple[Array, DecodeState, Fresh, Caches, Chosen]:
    """`verify`, and `prefill` of a chunk, in one pass of the target over all rows.

    `one` are the prompt's caches; what is about the prompt is as `prefill` has it.
    """
    assert models.dealt(rows=True) is None, "rows that travel, beside rows that do not"
    asked = ask(state, token_BK, keep_B, models, lay)
    rows, prompt_rows = rows_together(
        params["target"],
        models.target,
        [
            slots_part(
                kv,
                state.table_BN,
                asked.token_T,
                state.length_B,
                asked.packed,
                lay,
                backends,
            ),
            prompt_part(one.target, token_P, length, count, backends),
        ],
        models.taps,
        models.over,
        backends,
    )
    settled = settle(
        params,
        state,
        asked,
        rows,
        models=models,
        lay=lay,
        wire_width=wire_width,
        logprobs=logprobs,
        backends=backends,
    )
    done = settle_chunk(
        params,
        one,
        prompt_rows,
        length,
        count,
        sampling,
        models=models,
        logprobs=logprobs,
        backends=backends,
    )
    return *settled, *done
