"""A target that counts and a drafter that guesses it, to time steps without weights.

Both have random weights of a described size. Embedding and head of the target are set
so that one word wins at every position, by a margin that no rounding closes: the best
logits of plainly random weights all but tie, and in bfloat16 the batch would decide.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dcut_jax.config import DrafterConfig, LayerType, ModelConfig
from dcut_jax.cost.shapes import DRAFTER_BLOCK, DRAFTER_LAYERS, DRAFTER_TAPS
from dcut_jax.decode.steps import Models
from dcut_jax.decode.synthetic import Synthetic
from dcut_jax.models import dense, drafter, params
from dcut_jax.weights.load import RANDOM, Target, load_target

SYNTHETIC = "synthetic:"  # before a JSON file that says how often drafts are right
_CLEAR = 4.0  # an embedding's size beside all that the layers add to it


def read_synthetic(path: Path) -> Synthetic:
    """Reads a file with the fields of `Synthetic`, all but `name` and `advance`.

    Raises:
      ValueError: it is no such file.
    """
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a JSON file that says how often drafts are right at {path}, "
            f"found {error}; configs/synthetic has one"
        ) from error
    known = [f for f in fields(Synthetic) if f.name not in ("name", "advance")]
    needed = {f.name for f in known if f.default is MISSING}
    found = set(raw) if isinstance(raw, Mapping) else set()
    if not needed <= found <= {f.name for f in known}:
        raise ValueError(
            f"{path}: expected the fields {', '.join(f.name for f in known)}, of which "
            f"{' and '.join(sorted(needed))} must be there; found {sorted(found)}"
        )
    survival = raw["survival"]
    numbers = [v for k, v in raw.items() if k not in ("source", "survival")]
    if not isinstance(survival, list) or not all(
        isinstance(x, int | float) for x in (*survival, *numbers)
    ):
        raise ValueError(
            f"{path}: expected a list of numbers in `survival`, a text in `source` and "
            f"numbers in the other fields, found {raw}"
        )
    return Synthetic(path.stem, **{**raw, "survival": tuple(map(float, survival))})


def usual_drafter_config(
    target: ModelConfig, drafts: int, layers: int
) -> DrafterConfig:
    """A DFlash drafter in the proportions of the one published for Qwen3-8B.

    It has five layers and as many taps.
    """
    taps = np.linspace(1, max(target.layers - 3, 1), min(layers, DRAFTER_TAPS))
    full: LayerType = "full_attention"
    return DrafterConfig(
        vocab=target.vocab,
        embed=target.embed,
        mlp=target.mlp,
        layers=layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rope=target.rope,
        norm_eps=target.norm_eps,
        block=drafts + 1,
        mask_token=target.vocab - 1,
        target_layers=tuple(sorted({round(float(layer)) for layer in taps})),
        target_depth=target.layers,
        layer_types=(full,) * layers,
        causal=(False,) * layers,
    )


def counting(
    cfg: ModelConfig, weights: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Random weights made to count, and what a token grows by to become the next.

    A token's embedding is made large beside what the layers add, about 1 each, and the
    head looks for the embedding of the token before. A head that is the embedding
    finds the token itself, so such a target repeats it.
    """
    embed_VE = weights["embed_VE"]
    # A row of the table has length 1; what layers add has a mean square of about 1.
    size = _CLEAR * math.sqrt(cfg.layers * cfg.embed)
    large = {"embed_VE": (embed_VE * jnp.asarray(size, embed_VE.dtype))}
    if cfg.tied:
        return {**weights, **large}, 0
    return {**weights, **large, "head_VE": jnp.roll(embed_VE, 1, axis=0)}, 1


def synthetic_models(
    target: str, path: Path, dtype: DTypeLike, draft_dtype: DTypeLike
) -> tuple[Target, Models, str]:
    """A counting target, its models with a synthetic drafter, and that one's identity.

    Raises:
      ValueError: the target has weights of its own, or the file is none.
    """
    if not target.startswith(RANDOM):
        raise ValueError(
            f"--drafter {SYNTHETIC}... knows the text of random weights alone: "
            f"expected --target {RANDOM}PATH with it, found {target!r}; give a target "
            f"with weights a drafter with weights"
        )
    stated = read_synthetic(path)
    loaded = load_target(target, dtype)
    own, advance = counting(loaded.cfg, loaded.params)
    loaded = replace(loaded, params=own)
    drafts = min(len(stated.survival), DRAFTER_BLOCK - 1)
    cfg = usual_drafter_config(loaded.cfg, drafts, DRAFTER_LAYERS)
    tables = {"draft_embed_VE": own["embed_VE"], "draft_head_VE": dense.head_VE(own)}
    draft_type = jnp.dtype(draft_dtype)
    models = Models(
        loaded.cfg,
        cfg,
        {
            "target": own,
            "drafter": params.init(drafter.specs(cfg), jax.random.key(1), draft_type),
            **params.cast(tables, draft_type),
        },
        synthetic=replace(stated, advance=advance),
    )
    told = repr((models.synthetic, cfg)).encode()
    return loaded, models, hashlib.sha256(told).hexdigest()[:16]
