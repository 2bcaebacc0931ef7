"""Who is in which slot, with which pages, and who waits for some; on the host.

Nothing here knows of a device: whoever moves a request there is told what to do.
"""

import math
from collections.abc import Sequence

import numpy as np

from dcut_jax.cut.fairness import Fairness, weights
from dcut_jax.decode.steps import StepShapes
from dcut_jax.engine.paging import Paging
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.engine.slots import Prefill, Slot, StepRecord, most_positions


class Batch:
    """The requests of an engine.

    Attributes:
      slots: what is in each; None: nobody.
      aside: who was put aside for want of pages, the first to come back first.
      returning: one of these, and its text on its way back.
      admitted: requests so far.
      paging: which slot has which pages.
    """

    def __init__(self, shapes: StepShapes, prefix_cache: bool) -> None:
        self._width = shapes.width
        self._own_slots, self._shards = shapes.own_slots, shapes.shards
        self.slots: list[Slot | None] = [None] * shapes.slots
        self.aside: list[Slot] = []
        self.returning: tuple[Slot, Prefill] | None = None
        self.admitted = 0
        self.paging = Paging(shapes, prefix_cache)

    # -- what is there -------------------------------------------------------------

    @property
    def active(self) -> int:
        """Slots in use."""
        return len(self._used)

    @property
    def fullest(self) -> int:
        """Slots in use, of the shard that has most."""
        shard_of = [at // self._own_slots for at in self._used]
        return max(shard_of.count(shard) for shard in range(self._shards))

    @property
    def running(self) -> int:
        """Requests in slots, or put aside."""
        return self.active + len(self.aside)

    @property
    def inside(self) -> list[Slot]:
        """Requests that are in slots, in the order of these."""
        return [slot for slot in self.slots if slot is not None]

    @property
    def context(self) -> int:
        """Length of the longest running context, to which attention reads."""
        lengths = [
            len(s.request.prompt) + len(s.completion.tokens) for s in self.inside
        ]
        return max(lengths, default=0)

    @property
    def cap_ms(self) -> float:
        """What a step may take: every one yields a token of each request."""
        return min((s.request.tpot_ms for s in self.inside), default=math.inf)

    def weights(self, fairness: Fairness) -> np.ndarray:
        """What a token of each slot's request is worth, from steps that were read."""
        weight_B = np.ones(len(self.slots), np.float32)
        weight_B[self._used] = weights(
            fairness,
            [slot.request.priority for slot in self.inside],
            [slot.progress.rate for slot in self.inside],
        )
        return weight_B

    def waited(self, unread: StepRecord | None) -> np.ndarray:
        """Drafting steps, at most, since a draft of each request was verified.

        What `unread`, the step that was not read yet, verified of whom is not known.
        """
        cut = unread is not None and unread.decision is not None
        return np.array([s.waited + cut if s else 0 for s in self.slots], np.int32)

    # -- coming and going ------------------------------------------------------------

    def admits(self, request: Request) -> bool:
        """Whether there are a slot and pages for a request, and nobody waits for them.

        Always so while nothing runs, for one that fits the engine.
        """
        if self.aside or self.running == len(self.slots):
            return False
        return self.slot_for(request) is not None

    def slot_for(self, request: Request) -> int | None:
        """An empty slot with pages for a request's prompt and its first step."""
        empty = [i for i, slot in enumerate(self.slots) if slot is None]
        return self.paging.slot_for(empty, request.prompt, self._positions(request))

    def _positions(self, request: Request) -> int:
        return min(len(request.prompt) + self._width, most_positions(request))

    def enter(self, request: Request, entering: Slot) -> tuple[int, np.ndarray]:
        """Gives a request a slot and pages, which are there.

        `request` is its own, or what is left of it.

        Returns:
          The slot, and `page_N` of `Paging.enter`.
        """
        at = self.slot_for(request)
        assert at is not None, "admits() comes first"
        page_N = self.paging.enter(at, request.prompt, self._positions(request))
        self.slots[at] = entering
        return at, page_N

    def find(self, completion: Completion) -> int | None:
        """The slot of a request."""
        some = enumerate(self.slots)
        return next((i for i, s in some if s and s.completion is completion), None)

    def call_off(self, completion: Completion) -> bool:
        """Forgets a request that was put aside; False: it was not."""
        found = next((s for s in self.aside if s.completion is completion), None)
        if found is None:
            return False
        self.aside.remove(found)
        if self.returning is not None and self.returning[0] is found:
            self.returning = None
        return True

    def cancel_all(self) -> None:
        """Ends all requests, wherever they are; nothing else may come next."""
        for slot in (*self.inside, *self.aside):
            slot.completion.finish = "cancelled"

    def vacate(self, at: int, behind: int) -> Slot:
        """Frees a slot and gives its pages back; what they hold may be found later.

        `behind`: of the newest rows, those of which the drafter lacks its part.
        """
        slot = self.slots[at]
        assert slot is not None, "a slot that nobody is in"
        self.slots[at] = None
        if slot.completion.finish == "failed":  # what broke it may be in its pages
            self.paging.spoil(at)
            return slot
        known = max(slot.cached - behind, 0)
        text = (*slot.request.prompt, *slot.completion.tokens)
        self.paging.leave(at, text[:known])
        return slot

    # -- pages -----------------------------------------------------------------------

    def make_room(self, rows: int, behind: int) -> Sequence[int]:
        """Pages for all that a step of so many rows a request may commit.

        Comes when all earlier outcomes are known and before anything is written. Where
        there are too few, those who come last are put aside: they go on later, from
        what they emitted.

        Returns:
          The slots of these.
        """
        left: list[int] = []
        for at in sorted(self._used, key=self._rank):
            slot = self.slots[at]
            while slot and not self.paging.grow(at, min(slot.cached + rows, slot.most)):
                shard = self.paging.shard(at)
                others = [i for i in self._used if self.paging.shard(i) == shard]
                last = max(others, key=self._rank)
                aside = [*self.aside, self.vacate(last, behind)]
                self.aside = sorted(aside, key=lambda s: s.rank)
                left.append(last)
                slot = self.slots[at]
        return left

    @property
    def _used(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot is not None]

    def _rank(self, at: int) -> tuple[float, int]:
        slot = self.slots[at]
        assert slot is not None, "a slot that nobody is in"
        return slot.rank
