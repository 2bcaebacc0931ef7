"""Compiles the steps of decoding ahead of time, and keeps them.

Calling an executable with another shape raises instead of recompiling. Reading the
cache and writing it are separate executables: inside one program XLA would copy the
whole cache to keep the two apart.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.decode import steps as S
from dcut_jax.decode.decide import (
    PlanKey,
    Proposal,
    Situation,
    decide,
    init_memory,
)
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.placing import Places
from dcut_jax.decode.shards import from_first
from dcut_jax.decode.share import share
from dcut_jax.decode.state import DecodeState, init_state
from dcut_jax.mesh import Placement, place

Executable = Callable[..., Any]


class Compiler:
    """Compiles steps ahead of time and keeps them; nothing else in decoding compiles.

    Engines of the same models may share one. Outside `prepare` its methods look up, and
    raise RuntimeError for what was not prepared.

    Attributes:
      seconds: time spent in `prepare` and `run_once`.
    """

    def __init__(self, models: S.Models, cache_dtype: Any) -> None:
        self.models = models
        self.cache_dtype = jnp.dtype(cache_dtype)
        self.seconds = 0.0
        self._preparing = False
        self._kept: dict[Any, Executable] = {}
        self._never_ran: dict[Any, _Step] = {}
        self._params = jax.tree.map(lambda x: _shape(x.shape, x.dtype), models.params)
        self._at = Places(models, models.placement) if models.placement else None

    def require(self, models: S.Models, cache_dtype: Any) -> None:
        """Raises ValueError unless these are what it compiles for."""
        theirs = jax.tree.map(lambda x: _shape(x.shape, x.dtype), models.params)
        same = (
            models.target,
            models.drafter,
            models.placement,
            models.synthetic,
            theirs,
            jnp.dtype(cache_dtype),
        ) == (
            self.models.target,
            self.models.drafter,
            self.models.placement,
            self.models.synthetic,
            self._params,
            self.cache_dtype,
        )
        if not same:
            raise ValueError(
                "expected the models, the mesh and the cache dtype that this Compiler "
                f"was made for (caches in {self.cache_dtype}), found others; make one "
                "Compiler per pair of models, mesh and cache dtype"
            )

    def prepare(self, jobs: Sequence[Callable[[], Executable]]) -> None:
        """Runs compilations side by side: XLA uses little more than one core for one.

        Each job is a call of one of the methods below; no two may be the same.
        """
        start = time.perf_counter()
        self._preparing = True
        try:
            with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
                for done in [pool.submit(job) for job in jobs]:
                    done.result()
        finally:
            self._preparing = False
        self.seconds += time.perf_counter() - start

    def run_once(self) -> None:
        """Runs all that was compiled and never ran, one after another, on zeros.

        What a runtime does at an executable's first call (it loads kernels, it packs
        constants) would else be waited for in the midst of serving: SmolLM2's steps
        took 40 to 120 ms on two cores, and .2 to .5 s at first (docs/lab.md).

        The caches among the zeros are as large as an engine's own, which must not be
        there yet. In zeros no slot is in use, so no row is valid.
        """
        start = time.perf_counter()
        # Threads compiled these in any order; processes of a mesh must take one.
        for key in sorted(self._never_ran, key=repr):
            jax.block_until_ready(self._kept[key](*self._zeros(self._never_ran[key])))
        self._never_ran.clear()
        self.seconds += time.perf_counter() - start

    def _zeros(self, step: "_Step") -> tuple[Any, ...]:
        """Arguments of a step: the parameters, and zeros for all else."""
        at, placement = self._at, self.models.placement

        def zeros(shape: Any, partition: Any = None) -> Any:
            device = placement.sharding(partition) if placement else None
            return jnp.zeros(shape.shape, shape.dtype, device=device)

        def argument(arg: Any, names: Any) -> Any:
            if arg is self._params:
                return self.models.params
            if at is None:
                return jax.tree.map(zeros, arg)
            partitions = jax.tree.map(lambda name: getattr(at, name), names)
            return jax.tree.map(zeros, arg, jax.tree.broadcast(partitions, arg))

        return tuple(argument(*each) for each in zip(step.args, step.ins, strict=True))

    @property
    def made(self) -> tuple[Executable, ...]:
        """What was compiled so far."""
        return tuple(self._kept.values())

    @property
    def count(self) -> int:
        """Executables compiled so far."""
        return len(self._kept)

    def _get(self, key: Any, build: Callable[[], "_Step"]) -> Executable:
        if key not in self._kept:
            if not self._preparing:
                raise RuntimeError(
                    f"{key[0]} of {key[1:]} was not prepared; an engine compiles all "
                    f"that its policy can ask for when it is built"
                )
            options, step = compiler_options(self.models.placement), build()
            lowered = self._traced(step).lower()
            self._kept[key] = lowered.compile(compiler_options=options)
            self._never_ran[key] = step
        return self._kept[key]

    def _traced(self, step: "_Step") -> Any:
        placement, at = self.models.placement, self._at
        if placement is None or at is None:
            return jax.jit(step.fn, donate_argnums=step.donated).trace(*step.args)
        ins, outs = (
            jax.tree.map(lambda name: getattr(at, name), names)
            for names in (step.ins, step.outs)
        )
        fn = step.fn
        if not step.whole:
            # Unchecked: what is replicated is so by the gathers that `steps` ends with.
            fn = jax.shard_map(
                fn,
                mesh=placement.mesh,
                in_specs=ins,
                out_specs=outs,
                check_vma=False,
            )
        jitted = jax.jit(
            fn,
            donate_argnums=step.donated,
            in_shardings=jax.tree.map(placement.sharding, ins),
            out_shardings=jax.tree.map(placement.sharding, outs),
        )
        return jitted.trace(*step.args)

    def _state(self, shapes: S.StepShapes) -> DecodeState:
        return jax.eval_shape(lambda: _init_state(shapes))

    def _table(self, shapes: S.StepShapes) -> Any:
        return _ints(shapes.slots, shapes.slot_pages)

    def _caches(self, shapes: S.StepShapes) -> S.Caches:
        return jax.eval_shape(lambda: self._init_caches(shapes))

    def _init_caches(self, shapes: S.StepShapes) -> S.Caches:
        return S.init_caches(self.models, shapes.pages, self.cache_dtype, shapes.slots)

    def _of_prompt(self, shapes: S.StepShapes) -> S.Caches:
        return jax.eval_shape(lambda: self._init_of_prompt(shapes))

    def _init_of_prompt(self, shapes: S.StepShapes) -> S.Caches:
        return S.init_caches(self.models, shapes.slot_pages, self.cache_dtype)

    def start(self, shapes: S.StepShapes) -> Callable[[], tuple[DecodeState, S.Caches]]:
        """`() -> (state, caches)` of slots that are all empty."""

        def fn() -> tuple[DecodeState, S.Caches]:
            return _init_state(shapes), self._init_caches(shapes)

        if self.models.placement is None:
            return fn  # nothing to compile, and nothing that waits for it
        step = _Step(fn, (), (), ("slots", "caches"), whole=True)
        return self._get(("start", shapes), lambda: step)

    def table(self, table_BN: np.ndarray) -> Any:
        """A page table as steps take it; the host may go on to write its own."""
        placement, copy = self.models.placement, table_BN.copy()
        if placement is None or self._at is None:
            return copy
        return place(copy, placement.sharding(self._at.slots))

    def agree(self) -> Executable:
        """`number_1 -> number_1`, the one that the first process gives."""
        placement = self.models.placement
        assert placement is not None, "one process has nobody to agree with"
        fn = partial(from_first, axes=placement.mesh.axis_names)
        step = _Step(fn, (_floats(1),), ("whole",), "whole")
        return self._get(("agree",), lambda: step)

    def draft(self, shapes: S.StepShapes, width: int) -> Executable:
        """`(params, drafter cache, state) -> Proposal`."""

        def build() -> _Step:
            fn = partial(
                S.draft,
                models=self.models,
                width=width,
                columns=shapes.width - 1,
                backends=shapes.backends,
            )
            kv = self._caches(shapes).drafter
            args = (self._params, kv, self._state(shapes))
            return _Step(fn, args, ("params", "kv", "slots"), "whole")

        return self._get(("draft", shapes, width), build)

    def decide(self, shapes: S.StepShapes, key: PlanKey) -> Executable:
        """See `decide.decide`."""

        def build() -> _Step:
            B, K = shapes.slots, shapes.width - 1
            wire = _ints(B, shapes.wire_columns)
            situation = Situation(
                cost_ms_MR=_floats(len(key.widths), len(key.rows_R)),
                width_index=_ints(),
                weight_B=_floats(B),
                due_B=_shape((B,), jnp.bool_),
            )
            proposal = Proposal(_ints(B, K), _floats(B, K))
            memory = jax.eval_shape(lambda: init_memory(B, K))
            args = (proposal, self._state(shapes), memory, situation, wire, wire)
            fn = partial(decide, key=key, placement=self.models.placement)
            return _Step(fn, args, ("whole", "slots", *["whole"] * 4), "whole")

        return self._get(("decide", shapes, key), build)

    def verify(self, shapes: S.StepShapes, lay: Layout) -> Executable:
        """`(params, target cache, state, token_BK, keep_B) -> (wire, state, Fresh)`."""

        def build() -> _Step:
            B, K = shapes.slots, shapes.width - 1
            fn = partial(
                S.verify,
                models=self.models,
                lay=lay,
                wire_width=shapes.wire_width,
                logprobs=shapes.logprobs,
                backends=shapes.backends,
            )
            kv, state = self._caches(shapes).target, self._state(shapes)
            args = (self._params, kv, state, _ints(B, K), _ints(B))
            ins = ("params", "kv", "slots", "whole", "whole")
            return _Step(fn, args, ins, ("whole", "slots", "fresh"))

        return self._get(("verify", shapes, lay), build)

    def share(self, shapes: S.StepShapes, lay: Layout, chunk: int) -> Executable:
        """See `decode.share.share`; the prompt's caches are donated."""

        def build() -> _Step:
            B, K, one = shapes.slots, shapes.width - 1, _one(shapes)
            fn = partial(
                share,
                models=self.models,
                lay=lay,
                wire_width=shapes.wire_width,
                logprobs=shapes.logprobs,
                backends=shapes.backends,
            )
            kv, state = self._caches(shapes).target, self._state(shapes)
            prompt = (self._of_prompt(one), _ints(chunk), _ints(), _ints())
            asked = (kv, state, _ints(B, K), _ints(B))
            args = (self._params, *asked, *prompt, self._state(one).sampling)
            ins = ("params", "kv", "slots", *["whole"] * 2, "one_caches")
            outs = ("whole", "slots", "fresh", "one_caches", "whole")
            return _Step(fn, args, (*ins, *["whole"] * 4), outs, donated=5)

        return self._get(("share", shapes, lay, chunk), build)

    def commit(self, shapes: S.StepShapes, rows: int) -> Executable:
        """`(caches, page table, Fresh) -> caches`; the caches are donated.

        `rows`: of a shard.
        """

        def build() -> _Step:
            T = rows * shapes.shards

            def kv_rows(cfg: Any) -> Any:
                return _floats(cfg.layers, T, cfg.kv_heads, cfg.head_dim)

            target, cfg = kv_rows(self.models.target), self.models.drafter
            other, tap = kv_rows(cfg) if cfg else None, None
            if S.defers(self.models, rows, shapes.own_slots):
                other, tap = None, _floats(T, self.models.tap_columns)
            rows_at = _ints(T), _ints(T), _shape((T,), jnp.bool_)
            fresh = S.Fresh(target, target, other, other, tap, *rows_at)
            args = (self._caches(shapes), self._table(shapes), fresh)
            ins = ("caches", "slots", "fresh")
            return _Step(S.commit, args, ins, "caches", donated=0)

        return self._get(("commit", shapes, rows), build)

    def catch_up(self, shapes: S.StepShapes, steps: int) -> Executable:
        """`(params, caches, page table) -> caches`; these are donated."""

        def build() -> _Step:
            fn = partial(S.catch_up, models=self.models, steps=steps)
            args = (self._params, self._caches(shapes), self._table(shapes))
            ins = ("params", "caches", "slots")
            return _Step(fn, args, ins, "caches", donated=1)

        return self._get(("catch_up", shapes, steps), build)

    def empty(self, shapes: S.StepShapes) -> Executable:
        """`() -> caches` of a prompt."""
        fn = partial(self._init_of_prompt, shapes)
        step = _Step(fn, (), (), "one_caches", whole=True)
        return self._get(("empty", _one(shapes)), lambda: step)

    def lend(self, shapes: S.StepShapes) -> Executable:
        """`(caches, shard, page_N) -> caches` of a prompt, see `steps.lend`."""

        def build() -> _Step:
            fn = partial(S.lend, slot_axes=self.models.slot_axes)
            args = (self._caches(shapes), _ints(), _ints(shapes.slot_pages))
            return _Step(fn, args, ("caches", "whole", "whole"), "one_caches")

        return self._get(("lend", shapes), build)

    def prefill(self, shapes: S.StepShapes, chunk: int) -> Executable:
        """See `steps.prefill`; the caches are donated."""
        one = _one(shapes)

        def build() -> _Step:
            numbers = (_ints(chunk), _ints(), _ints())
            sampling = self._state(one).sampling
            caches = self._of_prompt(one)
            args = (self._params, caches, *numbers, sampling)
            fn = partial(
                S.prefill,
                models=self.models,
                logprobs=shapes.logprobs,
                backends=shapes.backends,
            )
            ins = ("params", "one_caches", *["whole"] * 4)
            return _Step(fn, args, ins, ("one_caches", "whole"), donated=1)

        return self._get(("prefill", one, chunk), build)

    def insert(self, shapes: S.StepShapes) -> Executable:
        """See `steps.insert`; the caches are donated."""

        def build() -> _Step:
            state, one = self._state(shapes), _one(shapes)
            goes_to = _ints(), _ints(shapes.slot_pages)
            numbers = (*[_ints()] * 3, _ints(state.stop_BZ.shape[1]))
            caches = self._caches(shapes), self._of_prompt(shapes)
            args = (state, *caches, *goes_to, *numbers, self._state(one).sampling)
            fn = partial(S.insert, slot_axes=self.models.slot_axes)
            ins = ("slots", "caches", "one_caches", *["whole"] * 7)
            return _Step(fn, args, ins, ("slots", "caches"), donated=1)

        return self._get(("insert", shapes), build)

    def release(self, shapes: S.StepShapes) -> Executable:
        """See `steps.release`."""

        def build() -> _Step:
            fn = partial(S.release, slot_axes=self.models.slot_axes)
            args = (self._state(shapes), _ints())
            return _Step(fn, args, ("slots", "whole"), "slots")

        return self._get(("release", shapes), build)


@dataclass(frozen=True)
class _Step:
    """What to compile.

    Attributes:
      fn: a function; on a mesh, of one device's part of everything.
      args: the shapes of its arguments, of the whole mesh.
      ins, outs: names in `Places` of where arguments and results lie.
      donated: the argument that it eats.
      whole: whether `fn` is of the whole mesh, and not of a device's part.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    ins: Any
    outs: Any
    donated: int | tuple[int, ...] = ()
    whole: bool = False


def compiler_options(placement: Placement | None = None) -> dict[str, Any]:
    """What every step of decoding is compiled with, on a mesh or on this device."""
    platform = (
        placement.mesh.devices.flat[0].platform if placement else jax.default_backend()
    )
    # On XLA:CPU, level 1 took a sixth off compiling, in one noisy run that could not
    # tell its step times from the default's (docs/lab.md).
    if platform == "cpu":
        return {"xla_backend_optimization_level": 1}
    return {}


def _init_state(shapes: S.StepShapes) -> DecodeState:
    return init_state(shapes.slots, shapes.stops, shapes.slot_pages, shapes.sampling)


def _one(shapes: S.StepShapes) -> S.StepShapes:
    """The same for a prompt on its own."""
    return replace(shapes, slots=1, shards=1, pages=0, chunks=())


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape: int) -> Any:
    return _shape(shape, jnp.int32)


def _floats(*shape: int) -> Any:
    return _shape(shape, jnp.float32)
