"""Measuring the cost table of an engine's steps, with real tokens in the caches."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dcut_jax.cut as cut_package
import dcut_jax.decode as decode_package
import dcut_jax.models as models_package
import pallas_kernels
from dcut_jax.cost.measure import measure
from dcut_jax.cost.table import KEY_PARTS, CostError, CostTable, Fingerprint
from dcut_jax.decode import steps as S
from dcut_jax.decode.compile import Compiler
from dcut_jax.decode.decide import Situation, init_memory
from dcut_jax.decode.defer import CATCH_UPS
from dcut_jax.decode.pack import Layout
from dcut_jax.decode.state import DecodeState
from dcut_jax.engine.config import EngineConfig, device_of
from dcut_jax.engine.dispatch import agree
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.memory import PROMPTS
from dcut_jax.engine.paging import dealt_out
from dcut_jax.engine.policy import ArPolicy, DCutPolicy
from dcut_jax.engine.requests import Request
from dcut_jax.engine.slots import Prefilled
from dcut_jax.models.cache import CHUNK, NO_PAGE, capacity, pages_for
from dcut_jax.processes import first, text_of_first

ROUNDS = 12
ENOUGH_MS = 400.0  # of one step, in all its rounds


def cores() -> int:
    """Cores that this process may use, which may be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fingerprint(
    models: S.Models, config: EngineConfig, target: str, drafter: str
) -> Fingerprint:
    """Where this process runs, and on what. `target`, `drafter`: their identities."""
    device, placement = device_of(models), models.placement
    forms = asdict(config.backends_on(device))
    weights, drafter_weights = models.params["target"], models.params.get("drafter")
    return Fingerprint(
        device_kind=device.device_kind,
        device_count=placement.mesh.size if placement else 1,
        # Of the process that measures, as is the table.
        host=text_of_first(f"{cpu_model()}, {cores()} cores")
        if device.platform == "cpu"
        else "",
        mesh=placement.described if placement else (),
        strategy=placement.strategy if placement else "single",
        target=target,
        drafter=drafter,
        dtype=str(weights["embed_VE"].dtype),
        draft_dtype=str(drafter_weights["fc_CE"].dtype) if drafter_weights else "",
        cache_dtype=config.cache_dtype,
        positions=capacity(config.max_length - 1),
        sampling=config.sampling,
        logprobs=config.logprobs + config.likeliest,
        backends=" ".join(f"{name}={form}" for name, form in forms.items()),
        jax=jax.__version__,
        code=code_digest(),
    )


@cache
def code_digest() -> str:
    """Of the source files that steps are made of: a change of them changes costs."""
    packages = (models_package, decode_package, cut_package, pallas_kernels)
    digest = hashlib.sha256()
    for package in packages:
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def cpu_model() -> str:
    """The processor's name, where the system tells it; of others its numbers."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    told: dict[str, str] = {}
    for key, value in pairs:
        told.setdefault(key.strip(), value.strip())
    if "model name" in told:
        return told["model name"]
    # Linux on ARM names none.
    numbers = [told[key] for key in told if key.startswith("CPU ")]
    return " ".join([platform.processor() or platform.machine(), *numbers])


def table_path(directory: Path, here: Fingerprint) -> Path:
    """File of the table for `here`; another fingerprint has another file."""
    digest = hashlib.sha256(json.dumps(asdict(here), sort_keys=True).encode())
    name = f"{here.device_kind}-{here.target}-{digest.hexdigest()[:12]}.json"
    return directory / name.replace(" ", "_").replace("/", "_")


def table_text(path: Path) -> str:
    """What is in the file of a table; "" where there is none.

    Of several processes the first reads, and writes; all act on the same table.
    """
    found = path.read_text(errors="replace") if first() and path.exists() else ""
    return text_of_first(found)


def default_directory() -> Path:
    """Where tables are kept: `$XDG_CACHE_HOME/dcut-jax/cost`, or under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dcut-jax" / "cost"


def contexts(config: EngineConfig) -> tuple[int, ...]:
    """Context lengths to profile: one page of the cache, four times as many, ..., all.

    In whole pages, as attention reads them. In between, costs are linear; outside there
    is nothing.
    """
    longest, found, length = capacity(config.max_length - 1), [], CHUNK
    while 3 * length < 2 * longest:
        found.append(length)
        length *= 4
    return (*found, longest)


def profile(
    models: S.Models,
    config: EngineConfig,
    policies: Sequence[DCutPolicy],
    here: Fingerprint,
    prompt: Sequence[int],
    *,
    compiler: Compiler | None = None,
    rounds: int = ROUNDS,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> CostTable:
    """Measures every step that D-Cut policies can ask for at one batch size.

    Args:
      policies: give draft widths and tiers; their tables are not read.
      prompt: real tokens, repeated to fill the caches up to each context. Drafts are
        the drafter's own and rows go where its confidence sends them.
      on_progress: called with what is measured, steps done, and steps in all.
    """
    engine = Engine(models, config, ArPolicy(), compiler=compiler)
    for policy in policies:
        engine.prepare(policy)
    found: dict[str, dict[tuple[int, ...], tuple[float, ...]]] = {
        kind: {} for kind in KEY_PARTS
    }
    ready = _fill(engine, prompt, engine.longest - 1)

    def progress(done: int, total: int) -> None:
        if on_progress:
            on_progress(f"batch {config.slots}", done, total)

    for (kind, *cell), samples in measure(
        _steps(engine, policies, contexts(config), ready),
        rounds=rounds,
        enough_ms=ENOUGH_MS,
        agree=partial(agree, engine.compiler),
        on_progress=progress,
    ).items():
        found[kind][tuple(cell)] = samples
    return CostTable(
        here,
        found["draft"],
        found["verify"],
        found["plan"],
        found["catch_up"],
        share=found["share"],
    )


def _steps(
    engine: Engine,
    policies: Sequence[DCutPolicy],
    ends: Sequence[int],
    ready: Prefilled,
) -> dict[tuple[Any, ...], Callable[[], object]]:
    """Every step to time, by kind and table key.

    All see the same caches; at shorter contexts, less of them.
    `ready`: a prompt of the longest, whose caches those that go along have.
    """
    exe, shapes, params = engine.compiler, engine.shapes, engine.models.params
    B = shapes.slots
    states = {
        end: replace(
            engine.state, length_B=jnp.minimum(engine.state.length_B, np.int32(end))
        )
        for end in ends
    }
    state = states[ends[-1]]
    key = policies[0].plan_key(shapes)
    memory = jax.device_get(init_memory(B, shapes.width - 1))
    widths = sorted({w for policy in policies for w in policy.ladder(shapes)})
    layouts = {lay for policy in policies for lay in policy.layouts(shapes)}
    widest = exe.draft(shapes, widths[-1])
    proposal = widest(params, engine.caches.drafter, state)
    logp_BK = np.asarray(proposal.logp_BK)

    def draft_step(width: int, context: int) -> Callable[[], object]:
        run = exe.draft(shapes, width)
        return lambda: run(params, engine.caches.drafter, states[context])

    def verify_step(lay: Layout, context: int) -> Callable[[], object]:
        run, write = exe.verify(shapes, lay), exe.commit(shapes, lay.rows)
        keep_B, those = _spread(logp_BK, lay), states[context]
        if lay.rows < lay.slots:
            those = replace(those, **_first_of_shards(those, lay))

        def step() -> object:
            wire, _, fresh = run(
                params, engine.caches.target, those, proposal.token_BK, keep_B
            )
            # Each time over the same positions: this context does not grow. It may
            # lie within a longer one, whose text is then spoilt but still of real rows.
            engine.caches = write(engine.caches, state.table_BN, fresh)
            return wire, engine.caches

        return step

    prompt = [ready.caches]

    def share_step(lay: Layout, chunk: int, context: int) -> Callable[[], object]:
        run, write = exe.share(shapes, lay, chunk), exe.commit(shapes, lay.rows)
        keep_B = _spread(logp_BK, lay)
        token_P: Any = np.resize(np.asarray(ready.request.prompt, np.int32), chunk)
        # In the middle of a prompt, as they are on the average.
        at = np.int32(max(context - chunk, 0) // 2), np.int32(chunk)
        drawn = engine.dispatch.sampling_of(ready.request)

        def step() -> object:
            asked = engine.caches.target, states[context], proposal.token_BK, keep_B
            wire, _, fresh, caches, _ = run(
                params, *asked, prompt.pop(), token_P, *at, drawn
            )
            prompt.append(caches)
            engine.caches = write(engine.caches, state.table_BN, fresh)
            return wire, engine.caches, caches

        return step

    def plan_step() -> object:
        situation = Situation(
            cost_ms_MR=np.ones((len(key.widths), len(key.rows_R)), np.float32),
            width_index=np.int32(len(key.widths) - 1),
            weight_B=np.ones(B, np.float32),
            due_B=np.zeros(B, bool),
        )
        wire = np.zeros((B, shapes.wire_columns), np.int32)
        _, _, bundle = exe.decide(shapes, key)(
            proposal, state, memory, situation, wire, wire
        )
        return np.asarray(bundle)

    def catch_up_step(steps: int) -> Callable[[], object]:
        run = exe.catch_up(shapes, steps)
        full_B: Any = np.full(B, steps, np.int32)

        def step() -> object:
            assert engine.caches.deferred is not None, "no drafter to catch up for"
            waiting = replace(engine.caches.deferred, count_B=full_B)
            behind = replace(engine.caches, deferred=waiting)
            engine.caches = run(params, behind, state.table_BN)
            return engine.caches

        return step

    steps: dict[tuple[Any, ...], Callable[[], object]] = {("plan", B): plan_step}
    for count in CATCH_UPS:
        steps["catch_up", B, count] = catch_up_step(count)
    for width, end in product(widths, ends):
        steps["draft", B, width, end] = draft_step(width, end)
    for lay, end in product(sorted(layouts, key=_size), ends):
        steps["verify", B, lay.rows, lay.width, end] = verify_step(lay, end)
    shared = {lay for policy in policies for lay in policy.shared(shapes)}
    for lay, chunk, end in product(sorted(shared, key=_size), shapes.chunks, ends):
        cell = "share", B, lay.rows, lay.width, chunk, end
        steps[cell] = share_step(lay, chunk, end)
    return steps


def _size(lay: Layout) -> tuple[int, int]:
    return lay.rows, lay.width


def _first_of_shards(state: DecodeState, lay: Layout) -> dict[str, Any]:
    """The fields of a state in which as many slots of each shard run as it has rows."""
    runs_B = np.arange(state.active_B.size) % lay.slots < lay.rows
    return {
        "active_B": state.active_B & runs_B,
        "length_B": jnp.where(runs_B, state.length_B, 0),
    }


def _fill(engine: Engine, prompt: Sequence[int], context: int) -> Prefilled:
    """Fills every slot with `context` real tokens, each slot with its own stretch.

    Returns one of the prompts that it filled them with.
    """
    engine.reset()
    tokens = np.resize(np.asarray(prompt), context + 7 * engine.config.slots)
    temperature = 1.0 if engine.config.sampling else 0.0
    # No more prompts than memory is kept for, see `EngineConfig.kv_memory`.
    stretches = [
        tokens[7 * i :][:context] for i in range(min(engine.config.slots, PROMPTS))
    ]
    distinct = [
        engine.prefill(
            Request(tuple(int(t) for t in some), 1, temperature=temperature, top_p=0.9)
        )
        for some in stretches
    ]
    table_BN = dealt_out(engine.shapes)
    # Where a slot's pages are fewer than a text of full length has, they must not be
    # written twice.
    unused = pages_for(context)
    for i in range(engine.config.slots):
        ready = distinct[i % len(distinct)]
        page_N = table_BN[i].copy()
        page_N[unused:] = NO_PAGE
        engine.dispatch.insert(i, ready, engine.shapes.positions, page_N)
    table = engine.compiler.table(table_BN)
    engine.state = replace(engine.state, table_BN=table)
    return distinct[0]


def _spread(logp_BK: np.ndarray, lay: Layout) -> np.ndarray:
    """Keep counts that fill a layout with the likeliest drafts, as a plan would.

    Of a layout of fewer slots than there are, every shard fills one of its own.
    """
    B, parts = lay.slots, []
    for own_BK in np.split(logp_BK, len(logp_BK) // B):
        survival_BK = np.cumsum(own_BK, axis=1)[:, : lay.width - 1]
        order = np.argsort(-survival_BK.T.ravel(), kind="stable")
        order = order[: max(lay.rows - B, 0)]
        parts.append(np.bincount(order % B, minlength=B))
    return np.concatenate(parts).astype(np.int32)


def cost_table(
    policies: Sequence[DCutPolicy],
    shapes: S.StepShapes,
    here: Fingerprint,
    directory: Path,
    *,
    measure_missing: Callable[[], CostTable] | None,
) -> CostTable:
    """The stored table for `here`, with all that policies need at this batch size.

    Args:
      measure_missing: measures this batch size where the store lacks it; None refuses.

    Raises:
      CostError: the stored table is another machine's, there is none and measuring is
        not allowed, or there is no place to keep one.
    """
    path = table_path(directory, here)
    text = table_text(path)
    stored = CostTable.parse(text, path).require(here) if text else None
    if stored and all(replace(p, table=stored).covered(shapes) for p in policies):
        return stored
    if measure_missing is None:
        raise CostError(
            f"expected a cost table with batch size {shapes.slots} at {path}, found "
            f"{'not all its costs' if stored else 'no file'}; measure one with "
            f"`python -m dcut_jax.profile`"
        )
    try:  # before a minute of measuring
        if first():
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CostError(
            f"expected a folder for cost tables at {directory}, found {error}; name "
            f"another"
        ) from error
    fresh = measure_missing()
    table = stored.merged(fresh) if stored else fresh
    if first():
        table.save(path)
    return table
