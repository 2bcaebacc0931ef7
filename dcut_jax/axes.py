"""Axis letters of the whole project, and how logical axes lie on a mesh.

Names of arrays end in the letters of their dimensions, in order: `logp_BK` is
`[requests, drafts]`.

| letter | dimension |
|---|---|
| B | requests (slots of a batch) |
| K | drafts of a request; a block has `W = K + 1` rows, its anchor's too |
| W | rows of a request in one step: anchor and drafts |
| T | rows of a verify step, over all requests (the tier) |
| R | tiers; M draft widths of the ladder |
| N | any number of token rows |
| S | positions of a sequence; P positions of one prefill chunk |
| L | positions of a KV cache |
| E | embedding (hidden size); F feed-forward; V vocabulary; C tapped layers x E |
| Q | experts of a layer; A experts that a row is sent to |
| H | query heads; G key/value heads; D head dimension |
| J | rows of an attention group; O groups beyond a request's first, I = B + O all |
| Y | layers; Z stop tokens of a request |
| X | a dimension that its function explains |
"""

from typing import Literal

LogicalAxis = Literal[
    "embed",
    "mlp",
    "experts",
    "routes",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "taps",
    "rank",
    "features",
]

Strategy = Literal["dp", "tp", "ep", "dp+tp", "tp+ep", "dp+ep"]
Rules = dict[str, tuple[str, ...]]

# Axes of a serving mesh, from the slowest links to the fastest: devices that share a
# model talk in every layer.
DATA, EXPERT, MODEL = "data", "expert", "model"
MESH_AXES = (DATA, EXPERT, MODEL)
# Not of parameters: the requests of a batch, and all that is theirs.
SLOTS = "slots"

_PARTS: dict[str, Rules] = {
    "dp": {SLOTS: (DATA,)},
    "tp": {axis: (MODEL,) for axis in ("heads", "kv_heads", "mlp", "vocab", "taps")},
    "ep": {SLOTS: (EXPERT,), "experts": (EXPERT,)},
}


def serving_rules(strategy: Strategy) -> Rules:
    """From logical axes to the mesh axes that cut them; what is absent is not cut.

    Of a strategy with several parts, an axis that two of them cut is cut by both.
    """
    rules: Rules = {}
    for part in strategy.split("+"):
        for axis, over in _PARTS[part].items():
            rules[axis] = rules.get(axis, ()) + over
    return rules


def mesh_axes(strategy: Strategy) -> tuple[str, ...]:
    """The axes that a strategy's mesh has."""
    used = {over for axes in serving_rules(strategy).values() for over in axes}
    return tuple(axis for axis in MESH_AXES if axis in used)


# Training cuts parameters over both axes, so that their optimiser state is never held
# twice; see `train.mesh`.
TRAINING_RULES: Rules = {
    "embed": (DATA,),
    "heads": (MODEL,),
    "kv_heads": (MODEL,),
    "mlp": (MODEL,),
    "vocab": (MODEL,),
    "taps": (MODEL,),
}
