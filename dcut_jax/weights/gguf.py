"""Reads GGUF files (format and tensor names: llama.cpp, package `gguf`)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike

from dcut_jax.config import ConfigError, Llama3Scaling, ModelConfig, RopeConfig
from dcut_jax.models.layers import rope_frequencies
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.names import GGUF_LLAMA, GGUF_QWEN3, assemble

if TYPE_CHECKING:
    from gguf import GGUFReader

_SCHEMES = {"llama": GGUF_LLAMA, "qwen3": GGUF_QWEN3}
_ROPE_FREQS = "rope_freqs.weight"


class GgufFile(Mapping[str, np.ndarray]):
    """A GGUF file: metadata, and tensors dequantised when they are asked for."""

    def __init__(self, path: Path):
        self.path = path
        self._reader = _open(path)
        self._tensors = {t.name: t for t in self._reader.tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        """One tensor, float32, in row-major order (`[out, in]` for a matrix)."""
        from gguf import dequantize  # only who has such a file needs the package

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is {tensor.tensor_type.name}, which "
                f"cannot be dequantised; use a file in F32, F16, BF16, Q8_0 or Q4_1"
            ) from error
        return values.reshape(self.shape(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def file_of(self, name: str) -> str:
        """The file itself, for messages."""
        del name
        return str(self.path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape; the file stores the fastest axis first."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """A metadata value without which the model is not described.

        Raises:
          ConfigError: it is missing.
        """
        value = self.field(key)
        if value is None:
            raise ConfigError(f"{self.path}: metadata `{key}` is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of the metadata; required if there is no default.

        Raises:
          ConfigError: it is missing, or not one number (one per layer, say).
        """
        value = self.require(key) if default is None else self.field(key, default)
        if not isinstance(value, int):
            raise ConfigError(
                f"{self.path}: metadata `{key}` is {str(value)[:80]}; expected one "
                f"whole number"
            )
        return value


def _open(path: Path) -> "GGUFReader":
    from gguf import GGUFReader

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a GGUF file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise CheckpointError(
            f"{path} is not a GGUF file: it begins with {magic!r}, expected b'GGUF'"
        )
    try:
        return GGUFReader(path)
    except Exception as error:  # whatever NumPy raises on views beyond the end
        raise CheckpointError(
            f"{path} is truncated or corrupt: {error}; fetch it again"
        ) from error


def _llama3_factors(scaling: Llama3Scaling, rope: RopeConfig, head_dim: int) -> Any:
    """What `rope_freqs.weight` holds: divisors of the plain frequencies."""
    plain = rope_frequencies(rope, head_dim)
    return plain / rope_frequencies(RopeConfig(rope.theta, scaling), head_dim)


def _rope(file: GgufFile, arch: str, head_dim: int) -> RopeConfig:
    """RoPE of the model.

    GGUF keeps the result of Llama 3's scaling (one divisor per pair), not its four
    numbers. Three of them are the same in every published Llama 3 and the fourth is
    the largest divisor, so they are tried, and must give the stored divisors.
    """
    kind = file.field(f"{arch}.rope.scaling.type", "none")
    if kind != "none":
        raise ConfigError(
            f"{file.path}: RoPE scaling {kind!r} is not supported; known: none, and "
            f"Llama 3's in {_ROPE_FREQS}"
        )
    rope = RopeConfig(float(file.require(f"{arch}.rope.freq_base")))
    if _ROPE_FREQS not in file:
        return rope
    stored = np.asarray(file[_ROPE_FREQS], np.float64)
    if stored.shape == (head_dim // 2,):
        if np.all(stored == 1):
            return rope
        guess = Llama3Scaling(float(np.max(stored)), 1.0, 4.0, 8192)
        factors = _llama3_factors(guess, rope, head_dim)
        if np.allclose(stored, factors, rtol=1e-5, atol=0):
            return RopeConfig(rope.theta, guess)
    raise ConfigError(
        f"{file.path}: tensor {_ROPE_FREQS} is not Llama 3's scaling (low 1, high 4, "
        f"8192 positions) of {head_dim // 2} pairs; use the Hugging Face checkpoint, "
        f"whose config.json states the scaling"
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Reads the metadata.

    Raises:
      ConfigError: naming the file, for an unknown architecture, a missing field or
        an option that is not supported.
    """
    arch = file.require("general.architecture")
    if arch not in _SCHEMES:
        raise ConfigError(
            f"{file.path}: architecture {arch!r} is not supported; "
            f"known: {', '.join(sorted(_SCHEMES))}"
        )
    if file.field(f"{arch}.expert_count", 0):
        raise ConfigError(f"{file.path}: a mixture of experts is not supported")
    embed = file.integer(f"{arch}.embedding_length")
    heads = file.integer(f"{arch}.attention.head_count")
    head_dim = file.integer(f"{arch}.attention.key_length", embed // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = file.field(f"{arch}.{key}", head_dim)
        if size != head_dim:
            raise ConfigError(
                f"{file.path}: {arch}.{key} is {size}; expected the head size, "
                f"{head_dim}"
            )
    if "token_embd.weight" not in file:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    return ModelConfig(
        vocab=file.shape("token_embd.weight")[0],
        embed=embed,
        mlp=file.integer(f"{arch}.feed_forward_length"),
        layers=file.integer(f"{arch}.block_count"),
        heads=heads,
        kv_heads=file.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope=_rope(file, arch, head_dim),
        norm_eps=_shortest(file.require(f"{arch}.attention.layer_norm_rms_epsilon")),
        max_position=file.integer(f"{arch}.context_length"),
        tied="output.weight" not in file,
        qk_norm=arch == "qwen3",
    )


def _shortest(value: float) -> float:
    """The decimal that was meant: 1e-05, where float32 gives 9.999999747e-06."""
    return float(str(np.float32(value)))


def load_gguf(file: GgufFile, dtype: DTypeLike) -> tuple[ModelConfig, dict[str, Any]]:
    """Loads a dense target; every tensor is dequantised, rounding once, to `dtype`.

    Raises:
      ConfigError: the metadata describes a model that is not supported.
      CheckpointError: naming file and tensor, where one is surplus, missing, of
        another shape or of a type that cannot be dequantised.
    """
    cfg = config_from_gguf(file)
    scheme = _SCHEMES[file.require("general.architecture")]
    return cfg, assemble(file, cfg, scheme, dtype, str(file.path))
