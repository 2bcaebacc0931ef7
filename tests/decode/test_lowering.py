"""Steps with every kernel in them, lowered for TPUs on a machine that has none."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dcut_jax.config import DrafterConfig, ModelConfig, RopeConfig
from dcut_jax.cost.table import CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.placing import abstract
from dcut_jax.decode.steps import Models, StepShapes, everything
from dcut_jax.engine.policy import DCutPolicy
from dcut_jax.mesh import Placement
from pallas_kernels.backends import Backends
from pallas_kernels.targets import lowering_for

LAYERS, DRAFT_LAYERS, WIDTH = 1, 1, 3
SIZES = {
    "vocab": 256,
    "embed": 128,
    "mlp": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "rope": RopeConfig(1e4),
    "norm_eps": 1e-6,
}
TARGET = ModelConfig(**SIZES, layers=LAYERS, max_position=512, tied=False)
DRAFTER = DrafterConfig(
    **SIZES,
    layers=DRAFT_LAYERS,
    block=WIDTH + 1,
    mask_token=0,
    target_layers=(0,),
    target_depth=LAYERS,
    layer_types=("sliding_attention",),
    causal=(False,),
    window=64,
)
KERNELS = Backends(
    budget_topk="pallas_tpu", confidence="pallas_tpu", attention="pallas_tpu"
)
# Heads, feed-forward parts and words over two devices; and requests over two more.
MESHES = {"tp": {"model": 2}, "dp+tp": {"data": 2, "model": 2}}


class ForTpu(Compiler):
    """Hands out texts of programs for a TPU in place of executables for this device."""

    def _get(self, key, build):
        with lowering_for("tpu"):
            lowered = self._traced(build()).lower(lowering_platforms=("tpu",))
        return lowered.as_text()


def models_on(strategy):
    """Declared parameters, on one device or over a mesh."""
    sizes = MESHES.get(strategy, {"model": 1})
    count = math.prod(sizes.values())
    devices = np.asarray(jax.devices()[:count]).reshape(*sizes.values())
    placement = Placement(Mesh(devices, tuple(sizes)), strategy or "tp")
    names = "target", "drafter", "draft_embed_VE", "draft_head_VE"
    models = Models(TARGET, DRAFTER, {})
    models = abstract(models, placement, dict.fromkeys(names, jnp.bfloat16))
    return models if strategy else replace(models, placement=None)


@pytest.mark.parametrize(
    "strategy", [None, "dp+tp", pytest.param("tp", marks=pytest.mark.slow)]
)
def test_the_whole_step_lowers_for_a_tpu_with_every_kernel_in_it(strategy):
    models = models_on(strategy)
    shapes = StepShapes(
        slots=4,
        positions=512,
        width=WIDTH + 1,
        stops=1,
        backends=KERNELS,
        shards=models.shards,
    )
    compiler = ForTpu(models, jnp.bfloat16)
    key = DCutPolicy(CostTable.empty()).plan_key(shapes)
    full = everything(shapes, WIDTH)
    kernels = {  # attention in each layer, and a head
        "draft": (compiler.draft(shapes, WIDTH), DRAFT_LAYERS + 1),
        "verify": (compiler.verify(shapes, full), LAYERS + 1),
        "prefill": (compiler.prefill(shapes, 32), LAYERS + 1),
    }
    for step, (text, count) in kernels.items():
        assert text.count("@tpu_custom_call") == count, step
    assert "@tpu_custom_call" in compiler.decide(shapes, key)
