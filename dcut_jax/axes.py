"""Axis letters of the whole project, and the logical axes of parameters.

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
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "taps",
    "rank",
    "features",
]
