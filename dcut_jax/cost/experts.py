"""How many experts of a layer the rows of a step touch.

Imports nothing but the standard library.
"""

import math
from collections.abc import Iterable

EVEN = math.inf  # a concentration: every expert is as likely as any other
# Beyond it the closed form loses digits, and is as good as even.
_NEARLY_EVEN = 1e5
_SEARCH = (1e-2, _NEARLY_EVEN)
_GOLDEN = (math.sqrt(5) - 1) / 2


def distinct_experts(
    experts: int, top_k: int, rows: float, concentration: float = EVEN
) -> float:
    """Expected number of distinct experts that `rows` rows of `top_k` each touch.

    Were all experts alike, a row would miss one with chance `1 - k/E`, and `T` rows
    would touch `E (1 - (1 - k/E)^T)`. They are not: a few are asked for often and many
    seldom, and rows of one text agree. So the chance of an expert is drawn from a beta
    distribution of mean `k/E`; the smaller `concentration`, its two parameters' sum,
    the more unequal they are. Then

        E (1 - B(a, b + T) / B(a, b)),   a = c k/E,  b = c (1 - k/E)

    with Euler's beta function B. One row touches `k` experts whatever it is.

    Args:
      rows: may be a fraction, and 0 rows touch nothing.
      concentration: above 0; `EVEN` for the formula without it.
    """
    if rows <= 0 or top_k >= experts:
        return float(experts) if rows > 0 else 0.0
    share = top_k / experts
    if concentration > _NEARLY_EVEN:
        return experts * -math.expm1(rows * math.log1p(-share))
    a, b = concentration * share, concentration * (1 - share)
    missed = (
        math.lgamma(b + rows)
        - math.lgamma(b)
        - math.lgamma(a + b + rows)
        + math.lgamma(a + b)
    )
    return experts * -math.expm1(missed)


def fit_concentration(
    experts: int, top_k: int, seen: Iterable[tuple[float, float]]
) -> float:
    """The concentration that meets pairs of (rows, distinct experts) best.

    Least squares of logs, by a golden-section search on the logarithm. `EVEN` where
    nothing below it is better.

    Raises:
      ValueError: nothing that tells: single rows touch `k` experts in any case.
    """
    telling = [(rows, found) for rows, found in seen if rows > 1 and found > 0]
    if not telling or top_k >= experts:
        raise ValueError(
            f"expected experts seen by steps of two rows and more, and fewer asked for "
            f"by a row than there are; found {telling} of {experts} experts, top "
            f"{top_k}"
        )

    def miss(log_c: float) -> float:
        return sum(
            math.log(distinct_experts(experts, top_k, rows, math.exp(log_c)) / found)
            ** 2
            for rows, found in telling
        )

    low, high = (math.log(c) for c in _SEARCH)
    for _ in range(60):
        step = _GOLDEN * (high - low)
        if miss(high - step) <= miss(low + step):
            high = low + step
        else:
            low = high - step
    best = (low + high) / 2
    return math.exp(best) if best < math.log(_NEARLY_EVEN) - 1e-3 else EVEN
