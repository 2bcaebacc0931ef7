"""The training loop: draws blocks, steps, evaluates, saves, and resumes exactly.

What a step sees, documents, anchors, words and width, is a function of its number and
the seed. So a checkpoint needs no data position and no random state, and a run that was
killed and resumed equals one that was not.
"""

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array

from dcut_jax.config import ConfigError, ModelConfig
from dcut_jax.files import write_text
from dcut_jax.mesh import place
from dcut_jax.models.dense import head_VE
from dcut_jax.train.blocks import Blocks
from dcut_jax.train.checkpoints import Checkpoints, has_checkpoints
from dcut_jax.train.config import (
    CONFIG,
    TARGET,
    TrainConfig,
    check_same_run,
    check_target,
    make_drafter_config,
)
from dcut_jax.train.data import (
    Dataset,
    DatasetError,
    Order,
    draw_blocks,
)
from dcut_jax.train.features import Features, make_features
from dcut_jax.train.held_out import held_out_matches
from dcut_jax.train.mesh import (
    batch_sharding,
    check_mesh,
    make_mesh,
    replicated,
    table_sharding,
)
from dcut_jax.train.run_log import RunLog, require_tensorboard
from dcut_jax.train.shortlist import check_shortlist, make_shortlist
from dcut_jax.train.step import compiled_step, init_state, new_state, on_mesh
from dcut_jax.weights.dflash import WEIGHTS, load_drafter
from dcut_jax.weights.load import load_target

FeaturesOf = Callable[[Any, Any], Features]


@contextmanager
def stop_on_sigterm() -> Iterator[list[bool]]:
    """A flag that SIGTERM and SIGINT set; the loop saves and leaves."""
    stopped = [False]

    def stop(*_: object) -> None:
        stopped[0] = True

    old = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


def any_process(flag: bool) -> bool:
    """Whether a flag is set in any process of the run; all get the same answer."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


class Trainer:
    """A run: everything that does not change from step to step, and what does.

    Holding it apart from the loop lets tests step it by hand.

    Raises:
      ConfigError: `init` is another drafter than the run's.
      DatasetError: the dataset has features of other layers, or too few documents to
        train on or to hold some out.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        target_cfg: ModelConfig,
        embed_VE: Array,
        target_head_VE: Array,
        data: Dataset,
        features: FeaturesOf | None = None,
        target: dict[str, str] | None = None,
    ):
        self.cfg = cfg
        self.target = target
        self.drafter_cfg = make_drafter_config(cfg, target_cfg)
        taps = data.manifest.get("taps")
        if taps is not None and tuple(taps) != self.drafter_cfg.target_layers:
            raise DatasetError(
                f"{data.path} has features of layers {taps}, the drafter taps "
                f"{list(self.drafter_cfg.target_layers)}"
            )
        self.data = data
        self.features = features
        self._check_features()
        dtype = jnp.dtype(cfg.compute_dtype)
        self.mesh = make_mesh(cfg.mesh_data, cfg.mesh_model)
        tied = target_head_VE is embed_VE
        self.embed_VE = self._table(embed_VE.astype(dtype))
        self.head_VE = (
            self.embed_VE if tied else self._table(target_head_VE.astype(dtype))
        )
        usable, self.held_out = split(data, cfg)
        self.skipped = len(data) - len(data.usable(cfg.length))
        size = data.index[usable, 2]
        self.order = Order(
            usable, size, cfg.docs * cfg.accumulate, cfg.lengths, cfg.seed
        )
        counts = data.counts(target_cfg.vocab)
        if cfg.shortlist:
            check_shortlist(cfg, target_cfg.vocab, data, self.order)
        self.frequent = np.argsort(-counts, kind="stable")[: cfg.shortlist_frequent]
        self.state = init_state(self.drafter_cfg, cfg)
        if cfg.init and not has_checkpoints(Path(cfg.out)):
            self.state = new_state(self.start_from(cfg.init), cfg)
        if self.mesh is not None:
            self.state = on_mesh(self.state, self.mesh, self.drafter_cfg, cfg)

    def _table(self, table_VE: Array) -> Array:
        """The target's embedding or head, where it is to lie."""
        if self.mesh is None:
            return table_VE
        check_mesh(self.mesh, self.drafter_cfg, self.cfg.docs)
        return place(table_VE, table_sharding(self.mesh))

    def _check_features(self) -> None:
        """Refuses a dataset that lacks what the run reads.

        Raises:
          DatasetError: saying what is missing.
        """
        online = self.cfg.features == "online"
        if online and self.features is None:
            raise DatasetError("features are to be computed, and nothing computes them")
        if not online and self.data.features is None:
            raise DatasetError(
                f"{self.data.path} has no features; make a dataset with them, or train "
                f'with features = "online"'
            )
        compares = self.cfg.objective.compares
        if compares and not online and not self.data.hidden_channels:
            raise DatasetError(
                f"{self.data.path} has no hidden states of the target, with which kl, "
                f"l1 and confidence compare; make it anew with "
                f"`python -m dcut_jax.train features`, or set them to 0"
            )

    def blocks(
        self, documents: np.ndarray, anchors: int, length: int, rng: np.random.Generator
    ) -> Blocks:
        """Anchors of some documents, with what the objective reads of the target."""
        blocks = draw_blocks(self.data, documents, anchors, length, rng)
        if self.features is not None and self.cfg.features == "online":
            taps, hidden = self.features(blocks.token_NS, blocks.length_N)
            blocks = dataclasses.replace(blocks, taps_NSC=taps, hidden_NSE=hidden)
        if not self.cfg.objective.compares:
            blocks = dataclasses.replace(blocks, hidden_NSE=None)
        return blocks

    def start_from(self, checkpoint: str) -> Any:
        """Parameters of an exported drafter, float32.

        Raises:
          ConfigError: it is not the drafter that the run describes.
        """
        found, weights = load_drafter(checkpoint, jnp.dtype("float32"))
        # Heads that it lacks are begun here.
        ours = dataclasses.replace(
            self.drafter_cfg,
            markov_rank=found.markov_rank and self.drafter_cfg.markov_rank,
            confidence_head=found.confidence_head and self.drafter_cfg.confidence_head,
        )
        if self.drafter_cfg.markov_rank and not found.markov_rank:
            # A confidence head reads the Markov head's row, too, and has another shape.
            weights.pop("confidence", None)
        if found != ours:
            theirs, wanted = map(dataclasses.asdict, (found, self.drafter_cfg))
            different = [n for n in wanted if wanted[n] != theirs[n]]
            raise ConfigError(
                f"init {checkpoint}: expected the drafter of this run, found another "
                f"{', '.join(different)}; start from scratch or change the run"
            )
        return self.state.params | weights

    def step(self) -> dict[str, float]:
        """Trains on the blocks of the state's step."""
        cfg, number = self.cfg, int(self.state.step)
        rng = np.random.default_rng((cfg.seed, number, 1))
        weights = np.asarray(cfg.width_weights) / np.sum(cfg.width_weights)
        width = int(rng.choice(cfg.widths, p=weights))
        documents, length = self.order.of_step(number)
        batches = []
        for some in documents.reshape(cfg.accumulate, cfg.docs):
            blocks = self.blocks(some, cfg.anchors, length, rng)
            shortlist = None
            if cfg.shortlist:
                shortlist = make_shortlist(
                    blocks, self.frequent, cfg.shortlist, self.drafter_cfg.vocab, rng
                )
            batches.append((blocks, shortlist))
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
        if self.mesh is not None:
            at = batch_sharding(self.mesh), replicated(self.mesh)
            stacked = tuple(map(place, stacked, at))
        self.state, metrics = compiled_step(
            self.state,
            self.embed_VE,
            self.head_VE,
            stacked,
            cfg=cfg,
            drafter_cfg=self.drafter_cfg,
            width=width,
            mesh=self.mesh,
        )
        return {k: float(v) for k, v in metrics.items()} | {"width": width}

    def evaluate(self, width: int) -> dict[str, Any]:
        """Drafts of held-out blocks against their documents; see `held_out_matches`."""
        return held_out_matches(
            self.state.best,
            self.drafter_cfg,
            self.embed_VE,
            self.head_VE,
            self.blocks,
            self.held_out,
            self.cfg,
            width,
        )

    def run(
        self,
        on_record: Callable[[dict[str, Any]], None] | None = None,
        *,
        tensorboard: bool = False,
    ) -> None:
        """Trains from the last whole checkpoint, or from the start, to the last step.

        Checkpoints are written while training goes on. However the run before ended,
        state and log are in the end what an unbroken run's are; but for times, which
        are this machine's.

        Args:
          on_record: told every line of the log.
          tensorboard: also write TensorBoard's event files, under `out`.

        Raises:
          ConfigError: the checkpoint is of a run with another config, see
            `check_same_run`; or `out` is an exported drafter.
          CheckpointError: there are checkpoints, and none can be read.
          DatasetError: the log has a line that is none of ours.
          ImportError: `tensorboard` is asked for and tensorboardX is not installed.
          SaveError: a checkpoint or a line of the log could not be written. What was
            saved before is untouched.
        """
        cfg = self.cfg
        if tensorboard:
            require_tensorboard()
        out = Path(cfg.out).resolve()
        out.mkdir(parents=True, exist_ok=True)
        with (
            Checkpoints(out, cfg.keep_every, write=True) as saved,
            stop_on_sigterm() as stopped,
        ):
            if saved.latest_step() is not None:
                check_same_run(cfg, out / CONFIG)
            elif (out / WEIGHTS).exists():
                raise ConfigError(
                    f"{out} is an exported drafter, whose config a run would write "
                    f"over; give the run a directory of its own"
                )
            restored = saved.restore(self.state)
            self.state = restored.state
            speaks = jax.process_index() == 0  # for all processes of the run
            if speaks:
                write_text(
                    out / CONFIG, json.dumps(dataclasses.asdict(cfg), indent=1) + "\n"
                )
                if self.target is not None:
                    write_text(out / TARGET, json.dumps(self.target, indent=1) + "\n")
            if int(self.state.step) < cfg.steps:
                saved.require_room(self.state)
            if speaks and self.skipped:
                print(
                    f"{self.skipped} of {len(self.data)} documents have no place for "
                    f"an anchor in their first {cfg.length} tokens and are left out"
                )
            step = int(self.state.step)
            with RunLog(out, step, tensorboard) if speaks else nullcontext() as log:

                def record(**entry: Any) -> None:
                    if log is None:
                        return
                    log.write(entry)
                    print(format_record(entry), flush=True)
                    if on_record is not None:
                        on_record(entry)

                self._train(saved, stopped, list(restored.losses), record)
            saved.wait()

    def _train(
        self,
        saved: Checkpoints,
        stopped: Sequence[bool],
        losses: list[float],
        record: Callable[..., None],
    ) -> None:
        """Steps, evaluates and saves to the last step, or until told to stop.

        `losses`: of the steps since the last line of the log.
        """
        cfg = self.cfg
        began, since = time.perf_counter(), 0
        stops = False
        while int(self.state.step) < cfg.steps and not stops:
            saved.check()
            metrics = self.step()
            number = int(self.state.step)
            require_finite(metrics, number)
            losses.append(metrics["loss"])
            since += 1
            if number % cfg.log_every == 0:
                ms = 1e3 * (time.perf_counter() - began) / since
                anchors = cfg.accumulate * cfg.docs * cfg.anchors
                record(
                    step=number,
                    loss=round(float(np.mean(losses)), 4),
                    grad_norm=round(metrics["grad_norm"], 3),
                    ms_per_step=round(ms, 1),
                    anchors_per_s=round(1e3 * anchors / ms, 1),
                )
                losses, began, since = [], time.perf_counter(), 0
            last = number == cfg.steps
            if len(self.held_out) and (number % cfg.eval_every == 0 or last):
                for width in cfg.widths:
                    record(step=number, width=width, **self.evaluate(width))
                began, since = time.perf_counter(), 0
            stops = any_process(stopped[0])
            if number % cfg.save_every == 0 or last or stops:
                saved.save(self.state, losses)


class DivergedError(ValueError):
    """A loss or a gradient that is no number: nothing after it is worth saving."""


def require_finite(metrics: dict[str, float], step: int) -> None:
    """Raises DivergedError where a step's metrics are not finite."""
    if not all(np.isfinite(value) for value in metrics.values()):
        raise DivergedError(
            f"step {step}: expected a finite loss and gradient, found {metrics}; what "
            f"was saved before is untouched. Take a lower lr or clip, or a longer "
            f"warmup, in a new run"
        )


def format_record(entry: dict[str, Any]) -> str:
    """One line for people."""
    return "  ".join(f"{k} {v}" for k, v in entry.items())


def split(data: Dataset, cfg: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """Documents to train on, and those to evaluate, which are apart from them.

    Raises:
      DatasetError: nothing is left to train on, or nothing is held out though the
        config asks for it.
    """
    usable = data.usable(cfg.length)
    draw = data.draws(cfg.seed)[usable]
    held = draw < cfg.eval_fraction
    if held.all():
        raise DatasetError(
            f"{data.path} has {len(data)} documents, {len(usable)} of them with an "
            f"anchor in their first {cfg.length} tokens, of which {held.sum()} are "
            f"held out; none is left to train on; collect more, or lower eval_fraction"
        )
    if cfg.eval_fraction and not held.any():
        raise DatasetError(
            f"{data.path} has {len(usable)} usable documents, and at eval_fraction "
            f"{cfg.eval_fraction} none of them is held out; raise it, or set it to 0 "
            f"to train without evaluation"
        )
    evaluated = usable[held][np.argsort(draw[held])][: cfg.eval_docs]
    return usable[~held], evaluated


def make_trainer(cfg: TrainConfig) -> Trainer:
    """A trainer with target and data as the config names them.

    Raises:
      CheckpointError: there is no such target, or it is not the one the run was begun
        with.
      ConfigError: the drafter does not go with the target, or `init` with the drafter.
      DatasetError: the dataset is missing, damaged, another target's, of other layers,
        or too small.
    """
    data = Dataset.open(cfg.data)
    target = load_target(cfg.target, jnp.bfloat16)
    theirs = data.manifest.get("target", target.identity)
    if theirs != target.identity:
        raise DatasetError(
            f"{cfg.data}: expected features of target {cfg.target}, which is "
            f"{target.identity}, found those of {theirs}; name the target that the "
            f"dataset was made with, or make one with this target"
        )
    if has_checkpoints(Path(cfg.out)):
        check_target(Path(cfg.out), target)
    features = None
    if cfg.features == "online":
        taps = make_drafter_config(cfg, target.cfg).target_layers
        features = make_features(target.params, target.cfg, taps)
    return Trainer(
        cfg,
        target.cfg,
        target.params["embed_VE"],
        head_VE(target.params),
        data,
        features,
        {"name": target.name, "identity": target.identity},
    )
