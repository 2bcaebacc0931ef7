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

from dcut_jax.decode import steps as S
from dcut_jax.decode.decide import (
    PlanKey,
    Proposal,
    Situation,
    decide,
    init_memory,
)
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.state import DecodeState, init_state

Executable = Callable[..., Any]


class Compiler:
    """Compiles steps ahead of time and keeps them; nothing else in decoding compiles.

    Engines of the same models may share one. Outside `prepare` its methods look up, and
    raise RuntimeError for what was not prepared.

    Attributes:
      seconds: time spent in `prepare`.
    """

    def __init__(self, models: S.Models, cache_dtype: Any) -> None:
        self.models = models
        self.cache_dtype = jnp.dtype(cache_dtype)
        self.seconds = 0.0
        self._preparing = False
        self._kept: dict[Any, Executable] = {}
        self._params = jax.tree.map(lambda x: _shape(x.shape, x.dtype), models.params)

    def require(self, models: S.Models, cache_dtype: Any) -> None:
        """Raises ValueError unless these are what it compiles for."""
        theirs = jax.tree.map(lambda x: _shape(x.shape, x.dtype), models.params)
        same = (models.target, models.drafter, theirs, jnp.dtype(cache_dtype)) == (
            self.models.target,
            self.models.drafter,
            self._params,
            self.cache_dtype,
        )
        if not same:
            raise ValueError(
                "expected the models and the cache dtype that this Compiler was made "
                f"for (caches in {self.cache_dtype}), found others; make one Compiler "
                "per pair of models and cache dtype"
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
            step = build()
            jitted = jax.jit(step.fn, donate_argnums=step.donated)
            lowered = jitted.lower(*step.args)
            self._kept[key] = lowered.compile(compiler_options=_compiler_options())
        return self._kept[key]

    def _state(self, shapes: S.StepShapes) -> DecodeState:
        return jax.eval_shape(
            lambda: init_state(shapes.slots, shapes.stops, shapes.sampling)
        )

    def _caches(self, shapes: S.StepShapes, *, decodes: bool = True) -> S.Caches:
        return jax.eval_shape(
            lambda: S.init_caches(
                self.models,
                shapes.slots,
                shapes.positions,
                self.cache_dtype,
                decodes=decodes,
            )
        )

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
            return _Step(fn, (self._params, kv, self._state(shapes)))

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
                all_verified=_shape((), jnp.bool_),
            )
            proposal = Proposal(_ints(B, K), _floats(B, K))
            memory = jax.eval_shape(lambda: init_memory(B, K))
            args = (proposal, self._state(shapes), memory, situation, wire, wire)
            return _Step(partial(decide, key=key), args)

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
            return _Step(fn, (self._params, kv, state, _ints(B, K), _ints(B)))

        return self._get(("verify", shapes, lay), build)

    def commit(self, shapes: S.StepShapes, rows: int) -> Executable:
        """`(caches, Fresh) -> caches`; the caches are donated."""

        def build() -> _Step:
            def kv_rows(cfg: Any) -> Any:
                return _floats(cfg.layers, rows, cfg.kv_heads, cfg.head_dim)

            target, cfg = kv_rows(self.models.target), self.models.drafter
            other, tap = kv_rows(cfg) if cfg else None, None
            if S.defers(self.models, rows, shapes.slots):
                other, tap = None, _floats(rows, self.models.tap_columns)
            place = _ints(rows), _ints(rows), _shape((rows,), jnp.bool_)
            fresh = S.Fresh(target, target, other, other, tap, *place)
            return _Step(S.commit, (self._caches(shapes), fresh), donated=0)

        return self._get(("commit", shapes, rows), build)

    def catch_up(self, shapes: S.StepShapes, steps: int) -> Executable:
        """`(params, caches) -> caches`, see `steps.catch_up`; they are donated."""

        def build() -> _Step:
            fn = partial(S.catch_up, models=self.models, steps=steps)
            return _Step(fn, (self._params, self._caches(shapes)), donated=1)

        return self._get(("catch_up", shapes, steps), build)

    def empty(self, shapes: S.StepShapes) -> Executable:
        """`() -> one-slot caches`, for a prompt."""
        one = replace(shapes, slots=1)
        fn = partial(
            S.init_caches,
            self.models,
            1,
            shapes.positions,
            self.cache_dtype,
            decodes=False,
        )
        return self._get(("empty", one), lambda: _Step(fn, ()))

    def prefill(self, shapes: S.StepShapes, chunk: int) -> Executable:
        """See `steps.prefill`; the caches are donated."""
        one = replace(shapes, slots=1)

        def build() -> _Step:
            numbers = (_ints(chunk), _ints(), _ints())
            sampling = self._state(one).sampling
            caches = self._caches(one, decodes=False)
            args = (self._params, caches, *numbers, sampling)
            fn = partial(
                S.prefill,
                models=self.models,
                logprobs=shapes.logprobs,
                backends=shapes.backends,
            )
            return _Step(fn, args, donated=1)

        return self._get(("prefill", one, chunk), build)

    def insert(self, shapes: S.StepShapes) -> Executable:
        """See `steps.insert`; the caches are donated."""

        def build() -> _Step:
            state, one = self._state(shapes), replace(shapes, slots=1)
            numbers = (*[_ints()] * 4, _ints(state.stop_BZ.shape[1]))
            caches = self._caches(shapes), self._caches(one, decodes=False)
            args = (state, *caches, *numbers, self._state(one).sampling)
            return _Step(S.insert, args, donated=1)

        return self._get(("insert", shapes), build)

    def release(self, shapes: S.StepShapes) -> Executable:
        """See `steps.release`."""

        def build() -> _Step:
            return _Step(S.release, (self._state(shapes), _ints()))

        return self._get(("release", shapes), build)


@dataclass(frozen=True)
class _Step:
    """What to compile: a function, the shapes of its arguments, and which it eats."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | tuple[int, ...] = ()


def _compiler_options() -> dict[str, Any]:
    # On XLA:CPU, level 1 took a sixth off compiling, in one noisy run that could not
    # tell its step times from the default's (docs/lab.md).
    if jax.default_backend() == "cpu":
        return {"xla_backend_optimization_level": 1}
    return {}


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape: int) -> Any:
    return _shape(shape, jnp.int32)


def _floats(*shape: int) -> Any:
    return _shape(shape, jnp.float32)
