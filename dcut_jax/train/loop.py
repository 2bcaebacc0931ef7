"""The training loop: draws blocks, steps, evaluates, saves, and resumes exactly.

What a step sees is a function of its number and the seed, so a run that was killed and
resumed equals one that was not.
"""

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dcut_jax.config import ConfigError, ModelConfig
from dcut_jax.files import write_text
from dcut_jax.models.dense import head_VE
from dcut_jax.train.checkpoints import checkpoints, restore, save
from dcut_jax.train.config import (
    CONFIG,
    TrainConfig,
    check_same_run,
    make_drafter_config,
)
from dcut_jax.train.data import (
    Dataset,
    DatasetError,
    documents_of_step,
    draw_blocks,
)
from dcut_jax.train.loss import block_matches
from dcut_jax.train.shortlist import make_shortlist
from dcut_jax.train.step import compiled_step, init_state, make_optimizer
from dcut_jax.weights.dflash import load_drafter
from dcut_jax.weights.load import load_target

compiled_matches = jax.jit(
    block_matches, static_argnames=("cfg", "width", "compute_dtype")
)


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
    ):
        self.cfg = cfg
        self.drafter_cfg = make_drafter_config(cfg, target_cfg)
        taps = data.manifest.get("taps")
        if taps is not None and tuple(taps) != self.drafter_cfg.target_layers:
            raise DatasetError(
                f"{data.path} has features of layers {taps}, the drafter taps "
                f"{list(self.drafter_cfg.target_layers)}"
            )
        self.data = data
        dtype = jnp.dtype(cfg.compute_dtype)
        self.embed_VE = embed_VE.astype(dtype)
        self.head_VE = (
            self.embed_VE
            if target_head_VE is embed_VE
            else target_head_VE.astype(dtype)
        )
        self.usable, self.held_out = split(data, cfg)
        counts = data.counts(target_cfg.vocab)
        self.frequent = np.argsort(-counts, kind="stable")[: cfg.shortlist_frequent]
        self.state = init_state(self.drafter_cfg, make_optimizer(cfg), cfg.seed)
        if cfg.init:
            self.state = dataclasses.replace(
                self.state, params=self.start_from(cfg.init)
            )

    def start_from(self, checkpoint: str) -> Any:
        """Parameters of an exported drafter, float32.

        Raises:
          ConfigError: it is not the drafter that the run describes.
        """
        found, weights = load_drafter(checkpoint, jnp.dtype("float32"))
        if found != self.drafter_cfg:
            theirs, ours = map(dataclasses.asdict, (found, self.drafter_cfg))
            different = [n for n in ours if ours[n] != theirs[n]]
            raise ConfigError(
                f"init {checkpoint}: expected the drafter of this run, found another "
                f"{', '.join(different)}; start from scratch or change the run"
            )
        return weights

    def step(self) -> dict[str, float]:
        """Trains on the blocks of the state's step."""
        cfg, number = self.cfg, int(self.state.step)
        rng = np.random.default_rng((cfg.seed, number, 1))
        weights = np.asarray(cfg.width_weights) / np.sum(cfg.width_weights)
        width = int(rng.choice(cfg.widths, p=weights))
        documents = documents_of_step(self.usable, cfg.docs, number, cfg.seed)
        blocks = draw_blocks(self.data, documents, cfg.anchors, cfg.length, rng)
        shortlist = None
        if cfg.shortlist:
            shortlist = make_shortlist(
                blocks, self.frequent, cfg.shortlist, self.drafter_cfg.vocab, rng
            )
        self.state, metrics = compiled_step(
            self.state,
            self.embed_VE,
            self.head_VE,
            blocks,
            shortlist,
            cfg=cfg,
            drafter_cfg=self.drafter_cfg,
            width=width,
        )
        return {k: float(v) for k, v in metrics.items()} | {"width": width}

    def evaluate(self, width: int) -> dict[str, Any]:
        """Drafts of held-out blocks against their documents, whole vocabulary.

        Returns:
          `accepted`: mean accepted length, the anchor's token included, of the longest
          matching prefix; `slots`: per slot, how often it matches where all before it
          did; `blocks`: how many blocks that is over. They are the same for all of the
          run's widths: those whose document goes on for the widest.
        """
        cfg = self.cfg
        widest = max((width, *cfg.widths))
        # The same blocks every time.
        rng = np.random.default_rng((cfg.seed, 2))
        reached = np.zeros(width, np.int64)
        matched = np.zeros(width, np.int64)
        count = 0
        for first in range(0, len(self.held_out), cfg.docs):
            some = self.held_out[first : first + cfg.docs]
            # One shape for all: the last batch repeats itself, and is cut below.
            full = np.resize(some, cfg.docs)
            blocks = draw_blocks(self.data, full, cfg.eval_anchors, cfg.length, rng)
            match, _ = compiled_matches(
                self.state.params,
                self.drafter_cfg,
                self.embed_VE,
                self.head_VE,
                blocks,
                width,
                jnp.dtype(cfg.compute_dtype),
            )
            reaches_NA = blocks.anchor_NA + widest < blocks.length_N[:, None]
            counted_NA = np.asarray(blocks.valid_NA & reaches_NA)
            counted_NA[len(some) :] = False
            prefix = np.cumprod(np.asarray(match)[counted_NA], axis=-1)
            count += len(prefix)
            matched += prefix.sum(axis=0)
            reached += np.concatenate([[len(prefix)], prefix.sum(axis=0)[:-1]])
        accepted = 1 + matched.sum() / max(count, 1)
        return {
            "accepted": float(accepted),
            "blocks": count,
            "slots": [round(float(s), 3) for s in matched / np.maximum(reached, 1)],
        }

    def run(self, on_record: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Trains from the last checkpoint, or from the start, to the last step.

        Raises:
          ConfigError: the checkpoint is of a run with another config; see
            `check_same_run`.
        """
        cfg = self.cfg
        out = Path(cfg.out).resolve()
        out.mkdir(parents=True, exist_ok=True)
        log = open(out / "log.jsonl", "a")

        def record(**entry: Any) -> None:
            print(json.dumps(entry), file=log, flush=True)
            print(format_record(entry), flush=True)
            if on_record is not None:
                on_record(entry)

        with checkpoints(out) as manager, stop_on_sigterm() as stopped, log:
            if manager.latest_step() is not None:
                check_same_run(cfg, out / CONFIG)
            self.state = restore(manager, self.state)
            write_text(
                out / CONFIG, json.dumps(dataclasses.asdict(cfg), indent=1) + "\n"
            )
            began, since = time.perf_counter(), 0
            losses: list[float] = []
            while int(self.state.step) < cfg.steps and not stopped[0]:
                metrics = self.step()
                number = int(self.state.step)
                losses.append(metrics["loss"])
                since += 1
                if number % cfg.log_every == 0:
                    ms = 1e3 * (time.perf_counter() - began) / since
                    record(
                        step=number,
                        loss=round(float(np.mean(losses)), 4),
                        grad_norm=round(metrics["grad_norm"], 3),
                        ms_per_step=round(ms, 1),
                        anchors_per_s=round(1e3 * cfg.docs * cfg.anchors / ms, 1),
                    )
                    losses, began, since = [], time.perf_counter(), 0
                last = number == cfg.steps
                if len(self.held_out) and (number % cfg.eval_every == 0 or last):
                    for width in cfg.widths:
                        record(step=number, width=width, **self.evaluate(width))
                    began, since = time.perf_counter(), 0
                if number % cfg.save_every == 0 or last or stopped[0]:
                    save(manager, self.state)
            if int(self.state.step) != manager.latest_step():
                save(manager, self.state)
            manager.wait_until_finished()


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
      CheckpointError: there is no such target.
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
    return Trainer(
        cfg,
        target.cfg,
        target.params["embed_VE"],
        head_VE(target.params),
        data,
    )
