"""Which drafts to verify where each may open experts that no other row needs.

In a mixture of experts a step reads the weights of every expert that one of its rows
asks for. A draft that asks for none but such as are read anyway costs little, and one
that opens new ones may cost more than it is worth (EcoSpec, arXiv 2607.12696; the
planning problem and its solution here are our own).

A value that is divided by a price would break the rule that what is kept of a request
is a prefix: a draft could outrank the one before it. So the set is chosen as a whole.
For a price of time in tokens, `l`, the set that maximises

    survivals - l * (rows + experts opened)

with every draft's forerunner and every draft's experts in it is a closure of largest
weight, which a minimum cut finds (Picard 1976). The best ratio of tokens to time is
found by taking the ratio of the last set for the next price, until it stops rising
(Dinkelbach 1967). Both are exact, at any size, to the rounding of weights to 2**30
steps in all.

Imports NumPy and SciPy only.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

_STEPS = 2**30
_ROUNDS = 50  # a handful is usual; each finds a better set


class ExpertPlan(NamedTuple):
    """The decision for one step."""

    keep_B: np.ndarray  # int32, drafts to verify, the first ones of each request
    rows: int  # anchors and kept drafts
    opened: int  # experts that these rows were said to ask for
    gain: float  # drafts expected to be accepted
    utility: float  # tokens per ms


def plan_experts(
    log_survival_BK: Any,
    active_B: Any,
    asks_BWX: Any,
    *,
    fixed_ms: float,
    row_ms: float,
    expert_ms: float,
) -> ExpertPlan:
    """Keeps the drafts that yield most tokens per millisecond, experts counted once.

    The time of a step is `fixed_ms + row_ms * rows + expert_ms * experts opened`. Of
    equal plans the one with fewer drafts is taken.

    Args:
      log_survival_BK: see `cut.survival.log_survival`. NaN is never kept, nor anything
        behind it.
      active_B: an inactive request has no anchor and keeps nothing.
      asks_BWX: whether a row is expected to ask for an expert: the anchor's row first,
        then a row per draft; experts of all layers side by side.
      fixed_ms, row_ms, expert_ms: at least 0; the first above it.

    Raises:
      ValueError: shapes that do not belong together, survivals above 1, or times that
        are none.
    """
    survival_BK = np.asarray(log_survival_BK, np.float64)
    active_B, asks_BWX = np.asarray(active_B, bool), np.asarray(asks_BWX, bool)
    _check(survival_BK, active_B, asks_BWX, (fixed_ms, row_ms, expert_ms))
    B, K = survival_BK.shape
    usable_BK = np.logical_and.accumulate(~np.isnan(survival_BK), axis=1)
    usable_BK &= active_B[:, None]
    worth_BK = np.where(usable_BK, np.exp(survival_BK), 0.0)

    # What the anchors open is paid for, and so is what a request's earlier rows do.
    open_X = asks_BWX[active_B, 0].any(axis=0)
    before_BKX = np.logical_or.accumulate(asks_BWX, axis=1)[:, :-1]
    new_BKX = asks_BWX[:, 1:] & ~before_BKX & ~open_X & usable_BK[..., None]
    anchors = int(active_B.sum())

    def judged(keep_B: np.ndarray) -> ExpertPlan:
        kept_BK = np.arange(K) < keep_B[:, None]
        rows = anchors + int(keep_B.sum())
        opened = int(open_X.sum() + new_BKX[kept_BK].any(axis=0).sum())
        gain = float(worth_BK[kept_BK].sum())
        ms = fixed_ms + row_ms * rows + expert_ms * opened
        return ExpertPlan(
            keep_B.astype(np.int32), rows, opened, gain, (anchors + gain) / ms
        )

    best = judged(np.zeros(B, int))
    for _ in range(_ROUNDS):
        keep_B = _closure(
            worth_BK - best.utility * row_ms,
            usable_BK,
            new_BKX,
            best.utility * expert_ms,
        )
        found = judged(keep_B)
        if found.utility <= best.utility * (1 + 1e-9):
            break
        best = found
    return best


def _closure(
    profit_BK: np.ndarray, usable_BK: np.ndarray, new_BKX: np.ndarray, price: float
) -> np.ndarray:
    """Prefixes with the largest profit less the price of each expert they open.

    Nodes: source, sink, usable drafts, experts that any of them opens. What can be
    reached from the source beside a maximum flow is the smallest such set.
    """
    B, K = usable_BK.shape
    drafts = np.flatnonzero(usable_BK.ravel())
    used_X = np.flatnonzero(new_BKX.any(axis=(0, 1)))
    node_N = np.full(B * K, -1)
    node_N[drafts] = 2 + np.arange(drafts.size)
    profit_N = profit_BK.ravel()[drafts]
    total = np.maximum(profit_N, 0).sum()
    if total <= 0:
        return np.zeros(B, int)
    to_steps = (_STEPS - 1) / total

    def steps(amount: np.ndarray) -> np.ndarray:
        return np.minimum(np.rint(amount * to_steps), _STEPS).astype(np.int64)

    gains, losses = profit_N > 0, profit_N < 0
    nodes = node_N[drafts]
    follows = drafts[drafts % K > 0]
    opener, opened = np.nonzero(new_BKX.reshape(B * K, -1)[drafts][:, used_X])
    first_expert = 2 + drafts.size
    experts = first_expert + np.arange(used_X.size)
    edges = [
        (np.zeros(gains.sum(), int), nodes[gains], steps(profit_N[gains])),
        (nodes[losses], np.ones(losses.sum(), int), steps(-profit_N[losses])),
        (node_N[follows], node_N[follows - 1], np.full(follows.size, _STEPS)),
        (nodes[opener], first_expert + opened, np.full(opener.size, _STEPS)),
        (experts, np.ones(experts.size, int), steps(np.full(experts.size, price))),
    ]
    start, end, room = (np.concatenate(part) for part in zip(*edges, strict=True))
    size = first_expert + used_X.size
    graph = csr_array((room.astype(np.int32), (start, end)), shape=(size, size))
    flow = maximum_flow(graph, 0, 1).flow
    left = csr_array(graph - flow)  # a flow back is room forth
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = breadth_first_order(left, 0, return_predecessors=False)
    taken_N = np.zeros(size, bool)
    taken_N[reached] = True
    kept_BK = np.zeros(B * K, bool)
    kept_BK[drafts] = taken_N[nodes]
    return kept_BK.reshape(B, K).sum(axis=1)


def _check(
    survival_BK: np.ndarray,
    active_B: np.ndarray,
    asks_BWX: np.ndarray,
    ms: tuple[float, float, float],
) -> None:
    B, K = survival_BK.shape if survival_BK.ndim == 2 else (-1, 0)
    if K < 1 or active_B.shape != (B,) or asks_BWX.shape[:-1] != (B, K + 1):
        raise ValueError(
            f"expected log_survival_BK [B, K], active_B [B] and asks_BWX [B, K + 1, X],"
            f" got {survival_BK.shape}, {active_B.shape} and {asks_BWX.shape}"
        )
    if (survival_BK > 0).any() or not active_B.any():
        raise ValueError(
            f"expected logs of survivals, at most 0, and an active request, got "
            f"{np.nanmax(survival_BK)} and {int(active_B.sum())}"
        )
    if not (np.isfinite(ms).all() and ms[0] > 0 and min(ms) >= 0):
        raise ValueError(
            f"expected finite times, fixed_ms above 0 and row_ms and expert_ms at "
            f"least 0, got {ms}"
        )
