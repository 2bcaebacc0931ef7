"""The page table of a batch, and the pools that its pages come from.

The host's side of `models.cache`: a pool per shard of a mesh, and a table of the
shards' own page numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jax.typing import DTypeLike

from dcut_jax.decode.steps import Models, StepShapes
from dcut_jax.engine.pages import Pages
from dcut_jax.models.cache import CHUNK, NO_PAGE, page_bytes, pages_for


def bytes_of_page(models: Models, dtype: DTypeLike) -> int:
    """What a page takes of each device: its part of both models' keys and values."""
    cfgs = [cfg for cfg in (models.target, models.drafter) if cfg is not None]
    parts = (
        models.placement.mesh.shape[models.over]
        if models.placement and models.over
        else 1
    )
    return sum(page_bytes(cfg, dtype) for cfg in cfgs) // parts


def pages_in(models: Models, dtype: DTypeLike, memory: int) -> int:
    """Pages, of all shards, that so many bytes of each device hold.

    Raises:
      ValueError: not one.
    """
    each = bytes_of_page(models, dtype)
    if memory < each:
        raise ValueError(
            f"a page of {CHUNK} positions takes {each} bytes of each device, keys and "
            f"values of all layers; expected kv_memory to hold one at least, found "
            f"{memory}"
        )
    return memory // each * models.shards


@dataclass(frozen=True)
class Hit:
    """A prefix that is in the caches: pages of a shard, in order."""

    shard: int
    pages: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.pages) * CHUNK


class Paging:
    """Gives pages to slots and takes them back.

    Attributes:
      table_BN: each slot's pages, in order.
      changed: whether the table differs from what it was when this was last set False.
    """

    def __init__(self, shapes: StepShapes, prefix_cache: bool) -> None:
        self.shapes = shapes
        self.prefix_cache = prefix_cache
        self.pools = [Pages(shapes.own_pages, CHUNK) for _ in range(shapes.shards)]
        self.table_BN: np.ndarray = np.full(
            (shapes.slots, shapes.slot_pages), NO_PAGE, np.int32
        )
        self.changed = False
        self._held: list[list[int]] = [[] for _ in range(shapes.slots)]

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return sum(pool.free for pool in self.pools)

    @property
    def used(self) -> int:
        """Pages that requests in slots have."""
        return sum(pool.used for pool in self.pools)

    @property
    def cached(self) -> int:
        """Pages with known prefixes that nobody uses."""
        return sum(pool.cached for pool in self.pools)

    def shard(self, slot: int) -> int:
        """The shard that has a slot."""
        return slot // self.shapes.own_slots

    def hit(self, tokens: Sequence[int]) -> Hit | None:
        """The longest known prefix of a prompt that leaves a token of it to be run."""
        hits = [Hit(i, tuple(self._match(i, tokens))) for i in range(len(self.pools))]
        best = max(hits, key=lambda hit: hit.tokens)
        return best if best.pages else None

    def slot_for(
        self, slots: Iterable[int], tokens: Sequence[int], positions: int
    ) -> int | None:
        """The slot, of some that are empty, that shares most with a prompt.

        None where no shard of theirs has the pages that its `positions` need beyond
        what it shares. Looking changes nothing.
        """
        first = {self.shard(slot): slot for slot in sorted(slots, reverse=True)}
        found: list[tuple[int, int]] = []
        for shard, slot in first.items():
            shared = self._match(shard, tokens, use=False)
            if pages_for(positions) - len(shared) <= self.pools[shard].room(shared):
                found.append((len(shared), -slot))
        return -max(found)[1] if found else None

    def enter(self, slot: int, tokens: Sequence[int], positions: int) -> np.ndarray:
        """Gives a slot pages for a prompt and so many positions in all.

        Its whole pages are known from now on; so the prompt is to be written before
        anything else is read.

        Returns:
          Of each page of the slot where the prompt's is to be written, `[N]`; `NO_PAGE`
          where it is shared or not there.
        """
        assert not self._held[slot], "a slot that somebody is in"
        pool, shared = (
            self.pools[self.shard(slot)],
            self._match(self.shard(slot), tokens),
        )
        pool.share(shared)
        own = pool.take(pages_for(positions) - len(shared))
        self._hold(slot, [*shared, *own])
        if self.prefix_cache:
            pool.name(tokens, self._held[slot])
        page_N = self.table_BN[slot].copy()
        page_N[: len(shared)] = NO_PAGE
        return page_N

    def grow(self, slot: int, positions: int) -> bool:
        """Gives a slot pages up to so many positions; False where there are too few."""
        pool, held = self.pools[self.shard(slot)], self._held[slot]
        missing = pages_for(positions) - len(held)
        if missing > pool.room():
            return False
        if missing > 0:
            self._hold(slot, [*held, *pool.take(missing)])
        return True

    def leave(self, slot: int, tokens: Sequence[int]) -> None:
        """Empties a slot; of what it holds, these first tokens may be found later."""
        pool, held = self.pools[self.shard(slot)], self._held[slot]
        if self.prefix_cache:
            pool.name(tokens, held)
        pool.give_back(held)
        self._hold(slot, [])

    def spoil(self, slot: int) -> None:
        """Empties a slot of whose pages nobody is to find any."""
        pool, held = self.pools[self.shard(slot)], self._held[slot]
        pool.forget(held)
        pool.give_back(held)
        self._hold(slot, [])

    def _match(
        self, shard: int, tokens: Sequence[int], *, use: bool = True
    ) -> list[int]:
        return self.pools[shard].match(tokens[:-1], use=use)

    def _hold(self, slot: int, pages: list[int]) -> None:
        self._held[slot] = pages
        self.table_BN[slot] = NO_PAGE
        self.table_BN[slot, : len(pages)] = pages
        self.changed = True


def dealt_out(shapes: StepShapes) -> np.ndarray:
    """A table of full slots, to time steps: where pages are too few they share."""
    per_shard = np.arange(shapes.own_slots * shapes.slot_pages) % shapes.own_pages
    return np.tile(per_shard.reshape(shapes.own_slots, -1), (shapes.shards, 1)).astype(
        np.int32
    )
