"""The device's side of an engine: what runs there, and the arrays that it leaves."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dcut_jax.decode import steps as S
from dcut_jax.decode.compile import Compiler, Executable
from dcut_jax.decode.decide import Proposal
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.sample import Sampling
from dcut_jax.decode.state import NO_STOP
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.paging import Hit, Paging
from dcut_jax.engine.policy import DCutPolicy, Policy
from dcut_jax.engine.requests import Request
from dcut_jax.engine.slots import Chunk, Phases, Prefill, Prefilled
from dcut_jax.engine.steering import Steering
from dcut_jax.models.cache import NO_PAGE
from dcut_jax.processes import several, wait_for_all

PREFILL_CHUNKS = (32, 128)


def rows_for(begun: Prefill, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that holds what is left of a prompt, or the largest."""
    return next((size for size in sizes if size >= begun.left), sizes[-1])


def agree(compiler: Compiler, number: float) -> float:
    """The first process's number, where there are several: all then go on alike."""
    if not several():
        return number
    return float(np.asarray(compiler.agree()(np.full(1, number, np.float32)))[0])


class Dispatch:
    """Runs an engine's executables on its state and caches.

    Nothing here waits, but for phases that are timed.

    Attributes:
      state: of the slots.
      caches: of all slots; see `free`.
      wire: outcome of the last step, on the device.
      behind: steps whose rows the drafter's cache may lack.
      steering: is told what runs, since it times steps; None: nobody does.
    """

    def __init__(
        self,
        models: S.Models,
        config: EngineConfig,
        shapes: S.StepShapes,
        compiler: Compiler,
        steering: Steering | None,
    ) -> None:
        self.models = models
        self.config = config
        self.shapes = shapes
        self.compiler = compiler
        self.steering = steering
        self._caches: S.Caches | None = None

    def prepare(self, policy: Policy) -> None:
        """Compiles all that a policy can ask for, and runs it, if it never ran.

        There must be no caches yet, see `Compiler.run_once`.
        """
        exe, shapes = self.compiler, self.shapes
        layouts = policy.layouts(shapes)
        jobs: list[Callable[[], Executable]]
        jobs = [partial(exe.draft, shapes, width) for width in policy.ladder(shapes)]
        jobs += [partial(exe.verify, shapes, lay) for lay in layouts]
        jobs += [partial(exe.prefill, shapes, chunk) for chunk in PREFILL_CHUNKS]
        jobs += [partial(exe.commit, shapes, n) for n in {lay.rows for lay in layouts}]
        jobs += [
            partial(exe.share, shapes, lay, chunk)
            for lay in policy.shared(shapes)
            for chunk in shapes.chunks
        ]
        jobs += [partial(f, shapes) for f in (exe.empty, exe.insert, exe.release)]
        if self.config.prefix_cache:
            jobs.append(partial(exe.lend, shapes))
        if self.models.placement:
            jobs.append(partial(exe.start, shapes))
        if several():
            jobs.append(exe.agree)
        if self.models.drafter:
            jobs += [partial(exe.catch_up, shapes, steps) for steps in CATCH_UPS]
        if isinstance(policy, DCutPolicy):
            jobs.append(partial(exe.decide, shapes, policy.plan_key(shapes)))
        exe.prepare(jobs)
        wait_for_all()
        exe.run_once()

    # -- arrays ----------------------------------------------------------------------

    def reset(self) -> None:
        """Empties every slot."""
        self.free()  # or there would be two of the caches for a while
        shapes = self.shapes
        self.state, self._caches = self.compiler.start(shapes)()
        self.behind = 0
        self.wire: Any = np.zeros((shapes.slots, shapes.wire_columns), np.int32)

    def free(self) -> None:
        """Gives the caches' memory back; only `reset` may come next."""
        self._caches = None

    def require(self) -> S.Caches:
        """The caches; raises ValueError where they were freed."""
        if self._caches is None:
            raise ValueError("this engine was freed; call reset() before anything else")
        return self._caches

    @property
    def caches(self) -> S.Caches:
        return self.require()

    @caches.setter
    def caches(self, caches: S.Caches) -> None:
        self._caches = caches

    # -- prompts -----------------------------------------------------------------------

    def begin(self, request: Request, hit: Hit | None) -> Prefill:
        """Caches for a prompt, of its own; in them what is known of it."""
        if hit is None:
            return Prefill(request, self.compiler.empty(self.shapes)())
        self.interrupt()
        page_N: np.ndarray = np.full(self.shapes.slot_pages, NO_PAGE, np.int32)
        page_N[: len(hit.pages)] = hit.pages
        lend = self.compiler.lend(self.shapes)
        return Prefill(
            request,
            lend(self.caches, np.int32(hit.shard), page_N),
            done=hit.tokens,
            found=hit.tokens,
        )

    def run_chunk(self, begun: Prefill) -> int:
        """The next chunk of a prompt, in a pass of its own; returns its tokens."""
        self.interrupt()
        chunk = Chunk.next(begun, rows_for(begun, PREFILL_CHUNKS))
        run = self.compiler.prefill(self.shapes, chunk.rows)
        chunk.ran(*run(self.models.params, *self._of_chunk(chunk)))
        return chunk.count

    def _of_chunk(self, chunk: Chunk) -> tuple[Any, ...]:
        """What executables take of a chunk."""
        begun = chunk.of
        at = np.int32(begun.done), np.int32(chunk.count)
        return begun.caches, chunk.token_P, *at, self.sampling_of(begun.request)

    def sampling_of(self, request: Request) -> Sampling | None:
        """A request's settings, as of one slot."""
        if not self.config.sampling:
            return None
        row: dict[str, Any] = {
            "temperature": np.array([request.temperature], np.float32),
            "top_k": np.array([request.top_k], np.int32),
            "top_p": np.array([request.top_p], np.float32),
            "min_p": np.array([request.min_p], np.float32),
            "seed": np.array([request.seed], np.int32),
        }
        return Sampling(**row)

    # -- slots -----------------------------------------------------------------------

    def insert(
        self, slot: int, ready: Prefilled, room: int, page_N: np.ndarray
    ) -> None:
        """Copies a prefilled prompt into pages and starts it in a slot.

        Args:
          room: tokens that it may still emit.
          page_N: see `Paging.enter`. The table is the caller's to write.
        """
        request = ready.request
        self.interrupt()
        stop = np.full(self.config.max_stops, NO_STOP, np.int32)
        stop[: len(request.stop)] = request.stop
        self.state, self.caches = self.compiler.insert(self.shapes)(
            self.state,
            self.caches,
            ready.caches,
            np.int32(slot),
            page_N,
            np.int32(ready.first_token),
            np.int32(len(request.prompt)),
            np.int32(room),
            stop,
            self.sampling_of(request),
        )

    def release(self, slot: int) -> None:
        """Stops a slot, which would decode on."""
        self.state = self.compiler.release(self.shapes)(self.state, np.int32(slot))

    def tell_table(self, paging: Paging) -> None:
        """Gives steps the table of pages as it is now."""
        if paging.changed:
            table_BN = self.compiler.table(paging.table_BN)
            self.state = replace(self.state, table_BN=table_BN)
            paging.changed = False

    # -- steps -----------------------------------------------------------------------

    def interrupt(self) -> None:
        """Tells the clock of steps that something else runs."""
        if self.steering is not None:
            self.steering.interrupt()

    def catch_up(self) -> None:
        """Brings the drafter's cache up to date."""
        if self.behind == 0:
            return
        steps = next(n for n in CATCH_UPS if n >= self.behind)
        run = self.compiler.catch_up(self.shapes, steps)
        if self.steering is not None:
            self.steering.catches_up(steps)
        self.caches = run(self.models.params, self.caches, self.state.table_BN)
        self.behind = 0

    def draft(self, width: int, clock: Phases) -> Proposal:
        """Drafts `width` tokens for every slot."""
        self.catch_up()
        if self.steering is not None:
            self.steering.drafts(width)
        run = self.compiler.draft(self.shapes, width)
        proposal = run(self.models.params, self.caches.drafter, self.state)
        clock.stop("draft", proposal)
        return proposal

    def verify(
        self,
        lay: Layout,
        token_BK: Any,
        keep_B: Any,
        clock: Phases,
        chunk: Chunk | None,
    ) -> None:
        """Verifies and commits, with a chunk of a prompt in the same pass."""
        if S.defers(self.models, lay.rows, lay.slots):
            if self.behind == CATCH_UPS[-1]:
                self.catch_up()
            self.behind += 1
        asked = self.models.params, self.caches.target, self.state, token_BK, keep_B
        if chunk is None:
            run = self.compiler.verify(self.shapes, lay)
            self.wire, self.state, fresh = run(*asked)
        else:
            run = self.compiler.share(self.shapes, lay, chunk.rows)
            self.wire, self.state, fresh, *prompt = run(*asked, *self._of_chunk(chunk))
            chunk.ran(*prompt)
        clock.stop("verify", self.wire)
        write = self.compiler.commit(self.shapes, lay.rows)
        self.caches = write(self.caches, self.state.table_BN, fresh)
        clock.stop("commit", self.caches)
