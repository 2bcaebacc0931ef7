"""What of a model decides its costs: sizes, without a parameter allocated.

Read from Hugging Face's `config.json`, or from a TOML file with the same names.
"""

from dataclasses import dataclass
from pathlib import Path

from dcut_jax.config import (
    ConfigError,
    DrafterConfig,
    ModelConfig,
    model_config_from_hf,
    read_config,
)

# Of the published DFlash drafter for Qwen3-8B: five layers as wide as the target's,
# which read five of its layers, and blocks of 16 rows.
DRAFTER_LAYERS, DRAFTER_TAPS, DRAFTER_BLOCK = 5, 5, 16


@dataclass(frozen=True)
class Layers:
    """Sizes that a target's layers and a drafter's have in common.

    Attributes:
      mlp: of a dense layer's feed-forward part.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    def __post_init__(self) -> None:
        sizes = (self.layers, self.embed, self.heads, self.kv_heads, self.head_dim)
        if min(sizes) < 1 or self.heads % self.kv_heads:
            raise ConfigError(
                f"expected layers with sizes of at least 1 and query heads that are a "
                f"multiple of the key/value heads, found {self}"
            )

    @property
    def attention_params(self) -> int:
        """Of one layer's four products."""
        return self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def kv_values(self) -> int:
        """Keys and values that one row leaves in one layer's cache."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def mlp_params(self) -> int:
        """Of one dense layer's feed-forward part."""
        return 3 * self.embed * self.mlp


@dataclass(frozen=True)
class ModelShape(Layers):
    """Sizes of a target, dense or a mixture of experts.

    Attributes:
      name: for people.
      tied: whether the LM head is the embedding.
      experts: routed experts of a layer; 0 in a dense model.
      top_k: of them, that a row asks for.
      expert_mlp, shared_mlp: width of one routed expert, and of the expert that every
        row goes through; 0: there is none.
      dense_layers: without experts.
      norms: weights of norms and of shared experts' gates: nearly nothing.
    """

    name: str = ""
    vocab: int = 1
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0
    norms: int = 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_params(self) -> int:
        """Of one routed expert."""
        return 3 * self.embed * self.expert_mlp

    @property
    def shared_params(self) -> int:
        """Of a layer's shared expert."""
        return 3 * self.embed * self.shared_mlp

    @property
    def router_params(self) -> int:
        """Of a layer with experts."""
        return self.embed * self.experts

    @property
    def head_params(self) -> int:
        return self.embed * self.vocab

    @property
    def params(self) -> int:
        """All of them."""
        mixture = (
            self.experts * self.expert_params + self.shared_params + self.router_params
        )
        dense = self.layers - self.moe_layers
        return (
            self.layers * self.attention_params
            + dense * self.mlp_params
            + self.moe_layers * mixture
            + self.head_params * (1 if self.tied else 2)
            + self.norms
        )

    @property
    def active_params(self) -> int:
        """Of which a token uses: all but the experts that it does not ask for."""
        idle = self.moe_layers * (self.experts - self.top_k) * self.expert_params
        return self.params - idle


@dataclass(frozen=True)
class DrafterShape(Layers):
    """Sizes of a DFlash drafter; embedding and head are the target's.

    Attributes:
      taps: layers of the target that it reads.
      block: rows of a full block, the anchor's included.
    """

    taps: int = DRAFTER_TAPS
    block: int = DRAFTER_BLOCK

    @property
    def context_params(self) -> int:
        """Products that a committed row goes through: the projection of the tapped
        states, and every layer's keys and values of it."""
        return self.embed * (self.taps * self.embed + self.layers * self.kv_values)

    @property
    def params(self) -> int:
        """Of all products."""
        own = self.layers * (self.attention_params + self.mlp_params)
        return own + self.taps * self.embed * self.embed


def model_shape(cfg: ModelConfig, name: str = "") -> ModelShape:
    """Sizes of a target that the engine runs."""
    mixture: dict[str, int] = {}
    norms = cfg.layers * (2 * cfg.embed + 2 * cfg.head_dim * cfg.qk_norm) + cfg.embed
    if (x := cfg.experts) is not None:
        norms += len(x.layers) * cfg.embed * x.shared_gate
        mixture = {
            "experts": x.count,
            "top_k": x.active,
            "expert_mlp": x.mlp,
            "shared_mlp": x.shared_mlp,
            "dense_layers": cfg.layers - len(x.layers),
        }
    return ModelShape(
        name=name,
        layers=cfg.layers,
        embed=cfg.embed,
        heads=cfg.heads,
        kv_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        mlp=cfg.mlp,
        vocab=cfg.vocab,
        tied=cfg.tied,
        norms=norms,
        **mixture,
    )


def drafter_shape(cfg: DrafterConfig) -> DrafterShape:
    """Sizes of a drafter that the engine runs."""
    return DrafterShape(
        layers=cfg.layers,
        embed=cfg.embed,
        heads=cfg.heads,
        kv_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        mlp=cfg.mlp,
        taps=len(cfg.target_layers),
        block=cfg.block,
    )


def usual_drafter(target: ModelShape) -> DrafterShape:
    """A DFlash drafter in the proportions of the one published for Qwen3-8B."""
    return DrafterShape(
        layers=DRAFTER_LAYERS,
        embed=target.embed,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        mlp=target.mlp,
    )


def read_shape(path: Path) -> ModelShape:
    """Sizes of a target, see `read_config`; its name is the file's or directory's.

    Raises:
      ConfigError: an unknown architecture, or a size that is missing.
    """
    name = path.name if path.is_dir() else path.stem
    return model_shape(model_config_from_hf(read_config(path), str(path)), name)


def targets_directory() -> Path:
    """Where the architectures that come with the project are."""
    package = Path(__file__).resolve().parents[1]
    installed, clone = package / "targets", package.parent / "configs" / "targets"
    return installed if installed.is_dir() else clone
