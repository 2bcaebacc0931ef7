"""Where parameters and the arrays of a step lie on a mesh."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dcut_jax.axes import EXPERT, MODEL, SLOTS
from dcut_jax.decode.steps import Caches, Fresh, Models
from dcut_jax.mesh import (
    Placement,
    param_partitions,
    place,
    require_divisible,
)
from dcut_jax.models import dense, drafter


def param_specs(models: Models) -> dict[str, Any]:
    """The declaration of every parameter in `models.params`."""
    target = dense.specs(models.target)
    if models.drafter is None:
        return {"target": target}
    table = target["embed_VE"]
    return {
        "target": target,
        "drafter": drafter.specs(models.drafter),
        "draft_embed_VE": table,
        "draft_head_VE": table,
    }


def on_mesh(models: Models, placement: Placement | None) -> Models:
    """The same models with their parameters cut over a mesh; None leaves them alone.

    Raises:
      ConfigError: something does not divide, with the sizes that do.
    """
    if placement is None:
        return models
    check_models(models, placement)
    specs = param_partitions(param_specs(models), placement)
    shardings = jax.tree.map(placement.sharding, specs)
    return replace(models, params=place(models.params, shardings), placement=placement)


def abstract(models: Models, placement: Placement, dtypes: Any) -> Models:
    """Models whose parameters are declared and never made, to compile for.

    Args:
      models: `params` is not looked at.
      dtypes: of the parameters: one per key of `params`.
    """
    check_models(models, placement)
    specs = param_specs(models)
    params = {
        name: jax.tree.map(
            lambda spec, dtype=dtypes[name]: jax.ShapeDtypeStruct(spec.shape, dtype),
            tree,
        )
        for name, tree in specs.items()
    }
    return replace(models, params=params, placement=placement)


def check_models(models: Models, placement: Placement) -> None:
    """Raises ConfigError where a mesh does not divide the models."""
    target, draft, experts = models.target, models.drafter, models.target.experts
    if experts is not None and placement.expert_axis is not None:
        many = placement.mesh.shape[placement.expert_axis]
        require_divisible(f"mesh axis {EXPERT}", many, {"experts": experts.count})
    if placement.model_axis is None:
        return
    sizes = {
        "heads": target.heads,
        "key/value heads": target.kv_heads,
        "feed-forward": target.mlp,
        "vocabulary": target.vocab,
    }
    if experts is not None:
        sizes["an expert's feed-forward"] = experts.mlp
        if experts.shared_mlp:
            sizes["the shared expert's"] = experts.shared_mlp
    if draft is not None:
        sizes |= {
            "the drafter's heads": draft.heads,
            "its key/value heads": draft.kv_heads,
            "its feed-forward": draft.mlp,
            "tapped channels": models.tap_columns,
        }
    require_divisible(f"mesh axis {MODEL}", placement.mesh.shape[MODEL], sizes)


class Places:
    """Partitions of what steps take and return, as prefixes of their trees.

    Attributes:
      whole: of what lies on every device.
      slots: of arrays with slots first.
      kv, caches: of the slots' caches; `one_caches` of a prompt's.
      fresh: of a step's rows.
      params: of the parameters.
    """

    def __init__(self, models: Models, placement: Placement) -> None:
        slots: Any = placement.spec([SLOTS])
        # Of keys and of values, in caches and of rows: three axes are the same.
        kv: Any = placement.spec([None, SLOTS, "kv_heads"])
        one: Any = placement.spec([None, None, "kv_heads"])
        self.whole = PartitionSpec()
        self.slots = slots
        self.kv = kv
        self.caches = Caches(kv, kv, slots)
        self.one_caches = Caches(one, one, None)
        self.fresh = Fresh(*[kv] * 4, *[slots] * 4)
        self.params = param_partitions(param_specs(models), placement)
