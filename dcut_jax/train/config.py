"""Settings of a training run: the keys of its TOML file, and the drafter they mean."""

import dataclasses
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from dcut_jax.config import ConfigError, DrafterConfig, LayerType, ModelConfig
from dcut_jax.train.data import differences
from dcut_jax.train.loss import Objective
from dcut_jax.weights.dflash import check_pair, default_taps
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.load import Target

CONFIG = "config.json"
TARGET = "target.json"
# What a run may be resumed with other values of: where things lie, and how often it
# says and saves something.
MAY_CHANGE = {
    *("data", "out", "init", "mesh_data", "mesh_model"),
    *("log_every", "eval_every", "save_every", "keep_every"),
}


POSITIVE = (
    *("layers", "taps", "block", "docs", "anchors", "length", "steps"),
    *(
        "mesh_data",
        "mesh_model",
        "accumulate",
        "log_every",
        "eval_every",
        "eval_anchors",
        "save_every",
    ),
)


KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
}
CHOICES = {
    "optimizer": ("adamw", "muon"),
    "features": ("cached", "online"),
    "compute_dtype": ("float32", "bfloat16", "float16"),
}


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
      ce, kl, l1, confidence, gamma, pace, heads_only: see `loss.Objective`. DFlash is
        `ce = 1`; DSpark is `ce = 0.1, l1 = 0.9, confidence = 1`.
      markov_rank: of the drafter's Markov head; 0 for none.
      sample_from_anchor: whether slot 0, which holds the anchor, drafts too, as in
        DSpark's own drafters; DFlash's do not. DeepSpec and SGLang read drafters with
        heads only so.
      optimizer: `adamw` or `muon`.
      accumulate: micro-batches of a step, each of `docs` documents.
      ema: decay of the moving average of parameters (after step t at most
        (1 + t) / (10 + t), so that first weights fade), which is what is evaluated and
        exported; 0 for none.
      features: `cached` in the dataset, or `online`, computed from the target in every
        step: slower, and nothing is stored.
      mesh_data, mesh_model: devices that documents and parameters are dealt over; see
        `train.mesh`.
      buckets: lengths, rising up to `length`, to which documents are padded; those of a
        step share one. Empty for `length` alone.
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
      save_every: steps between checkpoints, of which the last two are kept.
      keep_every: those of every so many steps, a multiple of `save_every`, are kept too
        and for good; 0 for none.
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
    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0
    confidence: float = 0.0
    pace: bool = False
    heads_only: bool = False
    markov_rank: int = 0
    sample_from_anchor: bool = False
    optimizer: str = "adamw"
    accumulate: int = 1
    ema: float = 0.0
    features: str = "cached"
    buckets: tuple[int, ...] = ()
    mesh_data: int = 1
    mesh_model: int = 1
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
    keep_every: int = 0

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
        if not all(1 <= w <= self.max_drafts for w in self.widths):
            raise ConfigError(
                f"widths {list(self.widths)} must lie in 1..{self.max_drafts}, the "
                f"drafts of a block of {self.block}"
            )
        if self.shortlist_frequent > self.shortlist:
            raise ConfigError(
                f"shortlist_frequent {self.shortlist_frequent} exceeds shortlist "
                f"{self.shortlist}"
            )
        kept = self.keep_every
        if not isinstance(kept, int) or kept < 0 or kept % self.save_every:
            raise ConfigError(
                f"keep_every must be a multiple of save_every, {self.save_every}, or 0 "
                f"to keep the last two checkpoints alone; found {kept!r}"
            )
        for name in ("eval_fraction", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} {getattr(self, name)} must lie in 0..1, 1 excluded"
                )
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is unknown; choose from "
                    f"{', '.join(known)}"
                )
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} {getattr(self, name)} must be above 0, and finite"
                )
        if not 0 <= self.warmup <= 1:
            raise ConfigError(
                f"warmup {self.warmup} must be a share of the steps, 0 to 1"
            )
        fine = all(0 <= weight < float("inf") for weight in self.width_weights)
        if not fine or not sum(self.width_weights):
            raise ConfigError(
                f"width_weights {list(self.width_weights)} must be at least 0, finite, "
                f"and not all 0"
            )
        for name in ("seed", "shortlist", "eval_docs", "markov_rank"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 0")
        for name in ("ce", "kl", "l1", "confidence", "gamma"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} {getattr(self, name)} must be at least 0, and finite"
                )
        if not self.ce + self.kl + self.l1 + self.confidence:
            raise ConfigError(
                "ce, kl, l1 and confidence are all 0: nothing is minimised; give one "
                "of them a weight"
            )
        if self.heads_only and not (self.markov_rank or self.confidence):
            raise ConfigError(
                "heads_only trains a Markov or a confidence head, and there is "
                "neither; set markov_rank or confidence"
            )
        if self.heads_only and self.optimizer == "muon":
            raise ConfigError(
                "heads_only leaves all else as it is, and muon lets weights decay that "
                "get no gradient; set optimizer to adamw"
            )
        if self.buckets and list(self.buckets) != sorted({*self.buckets, self.length}):
            raise ConfigError(
                f"buckets {list(self.buckets)} must rise and end with length "
                f"{self.length}"
            )

    @property
    def max_drafts(self) -> int:
        """Drafts of a full block."""
        return self.block if self.sample_from_anchor else self.block - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that documents are padded to."""
        return self.buckets or (self.length,)

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        return Objective(
            self.ce,
            self.kl,
            self.l1,
            self.confidence,
            self.gamma,
            self.pace,
            self.heads_only,
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
    for name, value in values.items():
        kind = fields[name].type
        if not _is_a(value, kind):
            given = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{path}: {name} must be {KINDS[kind]}; found {given!r}")
    return TrainConfig(**values)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value has the type of a field, one of `KINDS`."""
    if get_args(kind):
        each = get_args(kind)[0]
        return isinstance(value, tuple) and all(_is_a(v, each) for v in value)
    # Not isinstance, to which true is a number.
    return type(value) in ((int, float) if kind is float else (kind,))


def choose_taps(count: int, depth: int) -> tuple[int, ...]:
    """So many layers of a target to tap, evenly spaced and all different.

    Raises:
      ConfigError: the target has fewer layers to choose from.
    """
    taps = default_taps(count, depth)
    if min(taps) < 0 or max(taps) >= depth or len(set(taps)) < count:
        raise ConfigError(
            f"taps {count}: expected at most {max(1, depth - 3)}, for the target has "
            f"{depth} layers; choose fewer, or name them in target_layers"
        )
    return taps


def make_drafter_config(cfg: TrainConfig, target: ModelConfig) -> DrafterConfig:
    """A drafter with the target's layer shape, full attention throughout.

    Raises:
      ConfigError: the mask token is outside the target's vocabulary, or a tap is none
        of its layers.
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
        target_layers=cfg.target_layers or choose_taps(cfg.taps, target.layers),
        target_depth=target.layers,
        layer_types=(full,) * cfg.layers,
        causal=(False,) * cfg.layers,
        sample_from_anchor=cfg.sample_from_anchor,
        markov_rank=cfg.markov_rank,
        confidence_head=cfg.confidence > 0,
    )
    check_pair(target, drafter_cfg)
    return drafter_cfg


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


def check_target(run: Path, target: Target) -> None:
    """Refuses a target that is not the one a run was begun with, though shapes agree.

    Runs of versions that stored none are taken as they are.

    Raises:
      CheckpointError: with both identities.
    """
    path = run / TARGET
    if not path.is_file():
        return
    theirs = read_run(path)
    if theirs["identity"] != target.identity:
        raise CheckpointError(
            f"{run}: expected its target {theirs['name']} ({theirs['identity']}), "
            f"found {target.name} ({target.identity}); name the run's own"
        )


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
