"""What one step's outcome says of a request, by hand."""

import numpy as np
import pytest

from dcut_jax.decode.state import HostOutcome
from dcut_jax.engine.absorb import take
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.engine.slots import Slot, StepRecord


@pytest.mark.parametrize("teaches", [True, False])
def test_ease_is_not_learned_of_a_plan_whose_requests_have_changed(teaches):
    """A stop string ended one of them: `kept` has its drafts, `active` has it not."""
    request = Request((1, 2), 16)
    slot = Slot(0, request, Completion(), None)
    outcome = HostOutcome(
        token_BW=np.array([[5, 6, 7, 8]]),
        count_B=np.array([3]),
        accepted_B=np.array([2]),
        verified_B=np.array([3]),
        finished_B=np.array([False]),
        logp_BW=None,
        crowded=0,
        likeliest_BWL=None,
    )
    record = StepRecord(
        width=3, rows=8, kept=6, active=1, expected=1.5, teaches=teaches
    )
    before = (slot.ease.accepted, slot.ease.expected)
    take(slot, 0, outcome, record)
    assert slot.completion.tokens == [5, 6, 7]
    assert ((slot.ease.accepted, slot.ease.expected) != before) == teaches
