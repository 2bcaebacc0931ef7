"""The training loop: draws blocks, steps, evaluates, saves, and resumes exactly.

What a step sees is a function of its number and the seed, so a run that was killed and
resumed equals one that was not.
"""

import dataclasses
import json
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int

from dcut_jax.config import ConfigError, DrafterConfig, LayerType, ModelConfig
from dcut_jax.files import write_text
from dcut_jax.models import drafter, params
from dcut_jax.models.dense import head_VE
from dcut_jax.train.data import (
    Dataset,
    DatasetError,
    differences,
    documents_of_step,
    draw_blocks,
)
from dcut_jax.train.loss import Blocks, Shortlist, block_loss, block_matches
from dcut_jax.weights.dflash import check_pair, default_taps, load_drafter
from dcut_jax.weights.load import load_target

CONFIG = "config.json"
# What a run may be resumed with other values of: where things lie, and how often it
# says and saves something.
MAY_CHANGE = {"data", "out", "init", "log_every", "eval_every", "save_every"}


POSITIVE = (
    *("layers", "taps", "block", "docs", "anchors", "length", "steps"),
    *("log_every", "eval_every", "eval_anchors", "save_every"),
)


@dataclass(frozen=True)
class TrainConfig:
    """One training run; the fields are the keys of its TOML file.

    Attributes:
      target: as `weights.load.load_target` takes it.
      data: a dataset directory (`train.data`), with features.
      out: directory of the run: checkpoints, log.
      mask_token: an unused row of the target's embedding.
      init: an exported drafter to start from; empty for random parameters. Keep the
        seed of the run that made it, or it has trained on what is now held out.
      layers: of the drafter; heads and widths are the target's.
      target_layers: taps; empty for `taps` of them evenly spaced.
      block: full block, anchor included.
      docs, anchors: documents of a step, and blocks of each.
      length: tokens of a document that are used.
      widths, width_weights: drafts per block, drawn anew each step.
      gamma: slot `k` weighs `exp(-(k - 1) / gamma)`.
      shortlist: words of the softmax in training; 0 for the whole vocabulary.
      shortlist_frequent: how many of them are the dataset's most frequent; those
        beyond these and the labels are drawn at random.
      compute_dtype: what products read; parameters and sums are float32.
      steps: length of the run; fixed once begun, for the learning rate follows a
        cosine over them.
      eval_fraction: of the prompts, drawn by a hash of seed and prompt, whose
        documents are held out. So a document that is held out stays so however the
        dataset grows, and no prompt is on both sides.
      eval_docs: how many of the held-out documents are evaluated, at most: those with
        the smallest hashes, so a dataset that grows may change which.
    """

    # Where things lie makes no difference to what is compiled.
    target: str = field(compare=False)
    data: str = field(compare=False)
    out: str = field(compare=False)
    mask_token: int
    init: str = field(default="", compare=False)
    layers: int = 3
    target_layers: tuple[int, ...] = ()
    taps: int = 5
    block: int = 16
    seed: int = 0
    docs: int = 8
    anchors: int = 32
    length: int = 384
    widths: tuple[int, ...] = (15,)
    width_weights: tuple[float, ...] = (1.0,)
    gamma: float = 7.0
    shortlist: int = 0
    shortlist_frequent: int = 0
    compute_dtype: str = "bfloat16"
    steps: int = 10_000
    lr: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    log_every: int = 20
    eval_every: int = 500
    eval_fraction: float = 0.05
    eval_docs: int = 64
    eval_anchors: int = 16
    save_every: int = 500

    def __post_init__(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name} must be a whole number of at least 1; found {value!r}"
                )
        if len(self.widths) != len(self.width_weights):
            raise ConfigError(
                f"{len(self.widths)} widths and {len(self.width_weights)} weights"
            )
        if not all(1 <= w < self.block for w in self.widths):
            raise ConfigError(
                f"widths {list(self.widths)} must lie in 1..{self.block - 1}, the "
                f"drafts of a block of {self.block}"
            )
        if self.shortlist_frequent > self.shortlist:
            raise ConfigError(
                f"shortlist_frequent {self.shortlist_frequent} exceeds shortlist "
                f"{self.shortlist}"
            )
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(
                f"eval_fraction {self.eval_fraction} must lie in 0..1, 1 excluded"
            )


def read_config(
    path: str | Path, overrides: dict[str, Any] | None = None
) -> TrainConfig:
    """Reads a run's TOML file.

    Raises:
      ConfigError: a key is unknown or missing, or a value is out of range.
    """
    try:
        raw = tomllib.loads(Path(path).read_text()) | (overrides or {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return config_from_json(raw, str(path))


def config_from_json(raw: dict[str, Any], path: str) -> TrainConfig:
    """A config from the keys of its file.

    Raises:
      ConfigError: a key is unknown or missing, or a value is out of range.
    """
    fields = {f.name: f for f in dataclasses.fields(TrainConfig)}
    unknown = sorted(raw.keys() - fields.keys())
    if unknown:
        raise ConfigError(
            f"{path}: unknown keys {', '.join(unknown)}; known: {', '.join(fields)}"
        )
    missing = sorted(
        n
        for n, f in fields.items()
        if f.default is dataclasses.MISSING and n not in raw
    )
    if missing:
        raise ConfigError(f"{path}: keys {', '.join(missing)} are missing")
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()
    }
    return TrainConfig(**values)


def make_drafter_config(cfg: TrainConfig, target: ModelConfig) -> DrafterConfig:
    """A drafter with the target's layer shape, full attention throughout.

    Raises:
      ConfigError: the mask token is outside the target's vocabulary.
    """
    full: LayerType = "full_attention"
    drafter_cfg = DrafterConfig(
        vocab=target.vocab,
        embed=target.embed,
        mlp=target.mlp,
        layers=cfg.layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rope=target.rope,
        norm_eps=target.norm_eps,
        block=cfg.block,
        mask_token=cfg.mask_token,
        target_layers=cfg.target_layers or default_taps(cfg.taps, target.layers),
        target_depth=target.layers,
        layer_types=(full,) * cfg.layers,
        causal=(False,) * cfg.layers,
    )
    check_pair(target, drafter_cfg)
    return drafter_cfg


@flax.struct.dataclass
class TrainState:
    """What a checkpoint holds; parameters are the float32 masters."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]


def make_optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """AdamW without decay, clipped, warmed up, then a cosine to zero."""
    warmup = max(1, int(cfg.warmup * cfg.steps))
    schedule = optax.warmup_cosine_decay_schedule(0.0, cfg.lr, warmup, cfg.steps)
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.0),
    )


def init_state(
    drafter_cfg: DrafterConfig, tx: optax.GradientTransformation, seed: int
) -> TrainState:
    """Random parameters; what a layer adds to the residual starts small."""
    p = params.init(drafter.specs(drafter_cfg), jax.random.key(seed), jnp.float32)
    shrink = (2 * drafter_cfg.layers) ** -0.5
    layers = tuple(
        layer | {n: layer[n] * shrink for n in ("o_HDE", "down_FE")}
        for layer in p["layers"]
    )
    p = p | {"layers": layers}
    return TrainState(p, tx.init(p), jnp.zeros((), jnp.int32))


def train_step(
    state: TrainState,
    blocks: Blocks,
    shortlist: Shortlist | None,
    *,
    loss_fn: Callable[[Any, Blocks, Shortlist | None], Float[Array, ""]],
    tx: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, blocks, shortlist)
    # Optax relies on implicit promotion, which strict runs forbid.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new_params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return TrainState(new_params, opt_state, state.step + 1), metrics


@partial(
    jax.jit, static_argnames=("cfg", "drafter_cfg", "width"), donate_argnames="state"
)
def compiled_step(
    state: TrainState,
    embed_VE: Array,
    head_VE: Array,
    blocks: Blocks,
    shortlist: Shortlist | None,
    *,
    cfg: TrainConfig,
    drafter_cfg: DrafterConfig,
    width: int,
) -> tuple[TrainState, dict[str, Array]]:
    """`train_step` of a run; one program per width."""

    def loss_fn(p: Any, blocks: Blocks, shortlist: Shortlist | None) -> Array:
        return block_loss(
            p,
            drafter_cfg,
            embed_VE,
            head_VE,
            blocks,
            width,
            cfg.gamma,
            shortlist,
            jnp.dtype(cfg.compute_dtype),
        )

    tx = make_optimizer(cfg)
    return train_step(state, blocks, shortlist, loss_fn=loss_fn, tx=tx)


compiled_matches = jax.jit(
    block_matches, static_argnames=("cfg", "width", "compute_dtype")
)


def make_shortlist(
    blocks: Blocks,
    frequent: np.ndarray,
    size: int,
    vocab: int,
    rng: np.random.Generator,
) -> Shortlist:
    """The words of one step's softmax: its labels, frequent words, random others.

    Raises:
      ConfigError: the step's tokens alone are more than `size`.
    """
    sure = np.zeros(vocab, bool)
    sure[np.asarray(blocks.token_NS)] = True
    sure[frequent] = True
    words = np.flatnonzero(sure)
    if len(words) > size:
        # Frequent words that are not labels give way.
        sure[:] = False
        sure[np.asarray(blocks.token_NS)] = True
        words = np.flatnonzero(sure)
        if len(words) > size:
            raise ConfigError(
                f"a step has {len(words)} different tokens; shortlist {size} is too "
                f"small for them"
            )
    others = np.flatnonzero(~sure)
    drawn = rng.choice(others, size - len(words), replace=False)
    bias = np.zeros(size, np.float32)
    if len(drawn):
        bias[len(words) :] = np.log(len(others) / len(drawn))
    words = np.concatenate([words, drawn]).astype(np.int32)
    place = np.zeros(vocab, np.int32)
    place[words] = np.arange(size, dtype=np.int32)
    return Shortlist(words, place, bias)  # type: ignore[arg-type]


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


def read_run(path: Path) -> dict[str, Any]:
    """The config that a run stored.

    Raises:
      ConfigError: the file is missing, or is not JSON.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; is this a training run?")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def check_same_run(cfg: TrainConfig, path: Path) -> None:
    """Refuses to go on with a run that was begun with another config.

    Where things lie, and how often the run logs, evaluates and saves, may differ.
    Anything else changes what is trained or compared, `steps` too: the learning rate
    follows a cosine over them.

    Args:
      path: the config that the run stored.

    Raises:
      ConfigError: naming each field that differs, with both values.
    """
    there = read_run(path)
    differ = differences(there, json.loads(json.dumps(dataclasses.asdict(cfg))))
    differ = {name: text for name, text in differ.items() if name not in MAY_CHANGE}
    if not differ:
        return
    why = ""
    if "steps" in differ:
        why += "; the learning rate follows a cosine over `steps`"
    if differ.keys() - there.keys():
        why += "; what is absent there only the version that began the run can continue"
    raise ConfigError(
        f"{path.parent} has a checkpoint of a run with another config; it differs in "
        f"{', '.join(differ.values())}{why}; go on with the values of {path}, or name "
        f"another `out`"
    )


def format_record(entry: dict[str, Any]) -> str:
    """One line for people."""
    return "  ".join(f"{k} {v}" for k, v in entry.items())


def checkpoints(out: Path) -> ocp.CheckpointManager:
    """Checkpoints of a run; the last two are kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(out / "checkpoints", options=options)


def save(manager: ocp.CheckpointManager, state: TrainState) -> None:
    """Saves under the state's step."""
    manager.save(int(state.step), args=ocp.args.StandardSave(state), force=True)


def restore(manager: ocp.CheckpointManager, like: TrainState) -> TrainState:
    """The latest checkpoint, or `like` if there is none."""
    manager.wait_until_finished()
    step = manager.latest_step()
    if step is None:
        return like
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return manager.restore(step, args=ocp.args.StandardRestore(abstract))


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
