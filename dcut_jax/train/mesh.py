"""Training on a mesh of devices: where parameters, optimiser state and documents lie.

Two axes. Documents are dealt over `data`. Parameters, their averages and the
optimiser's state are cut over both: heads, feed-forward and words over `model`, the
embedding over `data`. Nothing of what is trained is held twice, but for norms. The
compiler adds the gathers and sums; the loss is that of one device, up to the order of
its sums.

Every process of a run draws the same documents and hands its devices their part.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcut_jax.axes import DATA, MODEL, TRAINING_RULES
from dcut_jax.config import ConfigError, DrafterConfig
from dcut_jax.mesh import partition, require_divisible
from dcut_jax.models import drafter
from dcut_jax.models.params import ParamSpec


def make_mesh(data: int, model: int) -> Mesh | None:
    """A mesh of all devices of all processes; None for a run on one device.

    Raises:
      ConfigError: a run on several, and there are more or fewer than `data * model`.
    """
    devices = jax.devices()
    if data * model == 1 and jax.process_count() == 1:
        return None
    if data * model != len(devices):
        raise ConfigError(
            f"mesh_data {data} times mesh_model {model} is {data * model} devices, and "
            f"there are {len(devices)}; make the product {len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(data, model), (DATA, MODEL))


def check_mesh(mesh: Mesh, cfg: DrafterConfig, docs: int) -> None:
    """Refuses a mesh over which something cannot be dealt evenly.

    Raises:
      ConfigError: naming what does not divide, and the sizes that do.
    """
    sizes = {
        MODEL: {
            "heads": cfg.heads,
            "key/value heads": cfg.kv_heads,
            "feed-forward": cfg.mlp,
            "vocabulary": cfg.vocab,
            "tapped channels": len(cfg.target_layers) * cfg.embed,
        },
        DATA: {"docs": docs, "hidden size": cfg.embed},
    }
    for axis, by_name in sizes.items():
        require_divisible(f"mesh_{axis}", mesh.shape[axis], by_name)


def param_shardings(mesh: Mesh, cfg: DrafterConfig) -> Any:
    """A sharding for every parameter of a drafter.

    What has one axis is small, and lies everywhere.
    """

    def cut(spec: ParamSpec) -> NamedSharding:
        many = len(spec.shape) > 1
        return NamedSharding(
            mesh, partition(spec.axes, TRAINING_RULES) if many else PartitionSpec()
        )

    return jax.tree.map(cut, drafter.specs(cfg))


def table_sharding(mesh: Mesh) -> NamedSharding:
    """Of the target's embedding and head, `[V, E]`."""
    return NamedSharding(mesh, PartitionSpec(MODEL, None))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of what has micro-batches first and documents second."""
    return NamedSharding(mesh, PartitionSpec(None, DATA))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
