"""Sizes of an engine, and the shapes of steps that follow from them."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from dcut_jax.config import ConfigError
from dcut_jax.decode import steps as S
from dcut_jax.engine.paging import pages_in
from dcut_jax.models.cache import capacity
from pallas_kernels.backends import Backends, defaults
from pallas_kernels.budget_topk import fits


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of a batch in flight.

    Attributes:
      slots: requests decoded together.
      max_length: longest prompt plus output, in tokens.
      max_stops: stop tokens a request may name.
      cache_dtype: of the key/value caches.
      sampling: whether requests may draw their tokens; without, steps are a little
        cheaper.
      logprobs: whether completions hold the log-probabilities of their tokens.
      likeliest: how many of the most likely tokens they hold beside each token; needs
        `logprobs` and `sampling`, and makes every step longer.
      backends: the forms of the kernels; None: the defaults of the device that the
        parameters are on (`pallas_kernels.backends.DEFAULTS`), and for a batch or a
        block that is too large for `budget_topk`'s kernel its form in XLA.
      kv_memory: bytes of each device for the pages of keys and values, of target and
        drafter; None: as many as all slots can fill. Beside them, a prompt on its way
        has caches of `max_length` positions, and there may be two: a new one, and one
        that was put aside and comes back.
      prefix_cache: whether prompts that begin alike share pages.
      shared_chunks: rows of chunks of prompts that `Engine.step` can take along, in the
        same pass of the target; (): none. Each is an executable more for every tier
        that it may go along with.
      fewer: rows that plain steps have where no more requests run; (): as many as there
        are slots, always. Each is an executable more.
    """

    slots: int
    max_length: int
    max_stops: int = 4
    cache_dtype: str = "float32"
    sampling: bool = False
    logprobs: bool = False
    likeliest: int = 0
    backends: Backends | None = None
    kv_memory: int | None = None
    prefix_cache: bool = True
    shared_chunks: tuple[int, ...] = ()
    fewer: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"batch size must be at least 1; found {self.slots}")
        if self.max_stops < 1:
            raise ValueError(f"max_stops must be at least 1; found {self.max_stops}")
        if self.max_length < 2:
            raise ValueError(
                f"max_length must hold a prompt and a token; found {self.max_length}"
            )
        if self.likeliest < 0 or (
            self.likeliest and not (self.logprobs and self.sampling)
        ):
            raise ValueError(
                f"expected a number of likeliest tokens of at least 0, and above 0 "
                f"logprobs and sampling with it; found {self.likeliest} with logprobs="
                f"{self.logprobs} and sampling={self.sampling}"
            )
        chunks = self.shared_chunks
        if list(chunks) != sorted(set(chunks)) or not all(c > 0 for c in chunks):
            raise ValueError(
                f"shared_chunks must be row counts above 0 in ascending order; found "
                f"{chunks}"
            )
        few = self.fewer
        if list(few) != sorted(set(few)) or not all(0 < r < self.slots for r in few):
            raise ValueError(
                f"fewer must be row counts above 0 and below the {self.slots} slots, "
                f"in ascending order; found {few}"
            )

    @property
    def positions(self) -> int:
        """Positions that a slot's caches hold."""
        return capacity(self.max_length)

    def shapes(self, models: S.Models) -> S.StepShapes:
        """Shapes of a step of these models.

        Raises:
          ConfigError: the slots cannot be dealt evenly over the models' mesh.
          ValueError: `shared_chunks` on a mesh with rows that travel to experts, a
            backend that cannot run where the parameters are, or a
            `kv_memory` without room for a page.
        """
        if self.slots % models.shards:
            raise ConfigError(
                f"batch size {self.slots}: expected a multiple of {models.shards}, the "
                f"parts of the mesh that requests are dealt over"
            )
        width = models.drafter.max_drafts + 1 if models.drafter else 1
        backends = self.backends_on(device_of(models))
        if self.backends is None and not fits(self.slots // models.shards, width - 1):
            backends = replace(backends, budget_topk="xla")
        travels = models.dealt(rows=True) is not None
        if travels and self.shared_chunks:
            raise ValueError(
                "rows of a prompt, which every device has, cannot go along with rows "
                "that travel to experts; expected shared_chunks=() on a mesh with an "
                f"expert axis, found {self.shared_chunks}"
            )
        return S.StepShapes(
            slots=self.slots,
            positions=self.positions,
            width=width,
            stops=self.max_stops,
            sampling=self.sampling,
            logprobs=self.logprobs + self.likeliest,
            backends=backends,
            shards=models.shards,
            crowds=travels,
            chunks=self.shared_chunks,
            fewer=tuple(r for r in self.fewer if r < self.slots // models.shards),
            pages=0
            if self.kv_memory is None
            else pages_in(models, self.cache_dtype, self.kv_memory),
        )

    def backends_on(self, device: Any) -> Backends:
        """The forms of the kernels on a device; raises as `shapes` does."""
        found = self.backends or defaults(device)
        found.check(device)
        return found


def device_of(models: S.Models) -> Any:
    """A device that parameters are on, or are declared for on a mesh of one kind."""
    if models.placement is not None:
        return models.placement.mesh.devices.flat[0]
    return min(
        jax.tree.leaves(models.params)[0].sharding.device_set, key=lambda d: d.id
    )
