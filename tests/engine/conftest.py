"""A tiny trained target with its drafters, and one compiler for all engines."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcut_jax.cost.table import CostTable
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.steps import Models
from dcut_jax.engine import absorb, batch, dispatch, engine, steering
from dcut_jax.models.dense import head_VE
from dcut_jax.weights.dflash import load_drafter
from dcut_jax.weights.hf import load_hf

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"


def load(drafter):
    """The target with one of its drafters, in float32."""
    target_cfg, target = load_hf(GOLDEN / "target", jnp.dtype("float32"))
    cfg, weights = load_drafter(GOLDEN / drafter, jnp.dtype("float32"))
    params = {
        "target": target,
        "drafter": weights,
        "draft_embed_VE": target["embed_VE"],
        "draft_head_VE": head_VE(target),
    }
    return Models(target_cfg, cfg, params)


@pytest.fixture(scope="session")
def pair():
    return load("full")


@pytest.fixture(scope="session")
def sliding_pair():
    return load("swa")


# -- the same pair with as many heads as eight devices can share

COPIES = 4
WORDS = 104  # of 101; the rest are copies of the first


def wide_layer(layer, kv_heads):
    """Each key/value head several times, with its queries; outputs scaled down."""

    def copied(x, axis):
        by_head = (*x.shape[:axis], kv_heads, -1, *x.shape[axis + 1 :])
        wide = jnp.repeat(x.reshape(by_head), COPIES, axis=axis)
        return wide.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return layer | {
        "q_EHD": copied(layer["q_EHD"], 1),
        "k_EGD": copied(layer["k_EGD"], 1),
        "v_EGD": copied(layer["v_EGD"], 1),
        "o_HDE": copied(layer["o_HDE"], 0) / COPIES,
    }


def widen(pair):
    """The function is the same, and so are text and acceptance.

    The added words tie with those they copy; the lower index wins, on another device
    or on the same.
    """

    def wide(cfg, params):
        layers = tuple(wide_layer(x, cfg.kv_heads) for x in params["layers"])
        heads = {"heads": cfg.heads * COPIES, "kv_heads": cfg.kv_heads * COPIES}
        return replace(cfg, vocab=WORDS, **heads), params | {"layers": layers}

    def more_words(table_VE):
        return jnp.concatenate([table_VE, table_VE[: WORDS - len(table_VE)]])

    target_cfg, target = wide(pair.target, pair.params["target"])
    drafter_cfg, drafter = wide(pair.drafter, pair.params["drafter"])
    target |= {name: more_words(target[name]) for name in ("embed_VE", "head_VE")}
    tables = {
        "draft_embed_VE": target["embed_VE"],
        "draft_head_VE": target["head_VE"],
    }
    return Models(
        target_cfg, drafter_cfg, {"target": target, "drafter": drafter} | tables
    )


@pytest.fixture(scope="session")
def wide_pair(pair):
    return widen(pair)


@pytest.fixture(scope="session")
def compiler(pair):
    """Engines of equal shapes share their executables, and so the seconds they take."""
    return Compiler(pair, "float32")


@pytest.fixture(scope="session")
def invented_table():
    """From a policy and shapes to a table with all its cells, at times one makes up."""

    def make(
        policy,
        shapes,
        verify_ms,
        draft_ms=lambda width: 1e-3,
        own_ms=lambda chunk: 0.1 * chunk,
    ):
        B = shapes.slots
        return CostTable(
            CostTable.empty().fingerprint,
            draft={(B, w, 128): (draft_ms(w),) for w in policy.ladder(shapes)},
            verify={
                (B, lay.rows, lay.width, 128): (verify_ms(lay),)
                for lay in policy.layouts(shapes)
            },
            plan={(B,): (1e-3,)},
            catch_up={(B, steps): (1e-6,) for steps in CATCH_UPS},
            share={
                (B, lay.rows, lay.width, chunk, 128): (verify_ms(lay) + own_ms(chunk),)
                for lay in policy.shared(shapes)
                for chunk in shapes.chunks
            },
        )

    return make


@pytest.fixture(scope="session")
def compilations():
    """Names of all that JAX has compiled since; clear it and look again."""
    names = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return names


class CountingNumpy:
    """NumPy as the engine sees it, noting every array that comes from the device."""

    def __init__(self):
        self.reads = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def asarray(self, x, *args, **kwargs):
        self.reads += isinstance(x, jax.Array)
        return np.asarray(x, *args, **kwargs)


@pytest.fixture
def reads(monkeypatch):
    """Counts what is read back from the device, by `np.asarray` or otherwise."""
    counting = CountingNumpy()
    array = type(jnp.zeros(1))
    value = array._value

    def read(x):
        counting.reads += 1
        return value.fget(x)

    for module in (absorb, batch, dispatch, engine, steering):
        monkeypatch.setattr(module, "np", counting)
    monkeypatch.setattr(array, "_value", property(read))
    return counting
