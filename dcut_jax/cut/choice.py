"""Steps to choose from, and what they cost."""

from typing import NamedTuple

import numpy as np


class StepCosts(NamedTuple):
    """What a step costs, ms, by drafting width (M) and tier (R).

    Infinite where there is no such step: a width that is not offered a tier, plain or
    unplanned steps that a policy does not take.
    """

    plain_ms: float  # nothing drafted, nothing planned
    planned_MR: np.ndarray
    full_M: np.ndarray  # all drafts verified, nothing planned
    anchors_first: bool = True  # whether the first tier is the anchors alone

    @property
    def cheapest_ms(self) -> float:
        """Of all steps."""
        return min(self.plain_ms, self.planned_MR.min(), self.full_M.min())

    def within(self, cap_ms: float) -> "StepCosts":
        """Only steps of at most `cap_ms`; the cheapest alone if there are none."""
        cap_ms = max(cap_ms, self.cheapest_ms)
        return self._replace(
            plain_ms=self.plain_ms if self.plain_ms <= cap_ms else np.inf,
            planned_MR=np.where(self.planned_MR <= cap_ms, self.planned_MR, np.inf),
            full_M=np.where(self.full_M <= cap_ms, self.full_M, np.inf),
        )

    def verifies(self, m: int) -> bool:
        """Whether a plan of the `m`-th width can verify a draft.

        Beside a prompt, or under a cap, there may be nothing but the anchors.
        """
        return bool(np.isfinite(self.planned_MR[m, int(self.anchors_first) :]).any())

    def verifying(self) -> "StepCosts":
        """Without plans that verify nothing, where a width has others."""
        if not self.anchors_first:
            return self
        others_M1 = np.isfinite(self.planned_MR[:, 1:]).any(axis=1, keepdims=True)
        anchors_R = np.arange(self.planned_MR.shape[1]) == 0
        return self._replace(
            planned_MR=np.where(others_M1 & anchors_R, np.inf, self.planned_MR)
        )


class Choice(NamedTuple):
    """A step to take: drafts to ask for, and whether a plan cuts them.

    `tries`: the plan is to verify something (`StepCosts.verifying`), for what is
    verified alone shows how drafts do.
    """

    width: int
    planned: bool
    tries: bool = False


PLAIN = Choice(0, planned=False)
