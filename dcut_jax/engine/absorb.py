"""What a prompt and each step gave a request, taken into its completion."""

from dataclasses import replace

import jax
import numpy as np

from dcut_jax.decode.state import BROKEN, HostOutcome
from dcut_jax.engine.requests import Completion, Likeliest, halted_after
from dcut_jax.engine.slots import Prefill, Prefilled, Slot, StepRecord, origins


def prefilled(begun: Prefill) -> Prefilled:
    """Waits for a prompt, of which all chunks were dispatched."""
    assert not begun.left, "a chunk was not run"
    assert begun.chosen is not None, "a request has a prompt"
    token, logp, beside = jax.device_get(begun.chosen)
    ready = Prefilled(begun.request, begun.caches, int(token))
    if logp is not None:
        ready = replace(ready, first_logprob=float(logp))
    if beside is not None:
        ready = replace(ready, first_likeliest=_pairs(beside.token, beside.logp))
    return ready


def begin(ready: Prefilled, number: int) -> Slot:
    """A request with its first token, which may be its last: its `finish` tells."""
    request = ready.request
    if ready.first_token == BROKEN:
        return Slot(number, request, Completion(finish="failed"), None)
    completion = Completion([ready.first_token], origins=["plain"])
    if ready.first_logprob is not None:
        completion.logprobs.append(ready.first_logprob)
    if ready.first_likeliest:
        completion.likeliest.append(ready.first_likeliest)
    halt = request.halt() if request.halt else None
    if ready.first_token in request.stop or (halt and halt(ready.first_token)):
        completion.finish = "stop"
    elif request.max_new_tokens == 1:
        completion.finish = "length"
    return Slot(number, request, completion, halt)


def take(slot: Slot, at: int, outcome: HostOutcome, record: StepRecord) -> None:
    """Hands a request what a step committed for it, in slot `at`, and counts it.

    Its `finish` is set where it ends; the step itself need not know of that, where a
    stop string ends it.
    """
    count = int(outcome.count_B[at])
    done = slot.completion
    tokens = outcome.token_BW[at, :count].tolist()
    broken = tokens[-1] == BROKEN
    if broken:
        del tokens[-1]
        count -= 1
    end = halted_after(slot.halt, tokens) if slot.halt else None
    count = end or count
    accepted = int(outcome.accepted_B[at])
    verified = int(outcome.verified_B[at])
    done.origins.extend(origins(count, accepted, verified))
    done.tokens.extend(tokens[:count])
    if outcome.logp_BW is not None:
        done.logprobs.extend(outcome.logp_BW[at, :count].tolist())
    if outcome.likeliest_BWL is not None:
        token_BWL, logp_BWL = outcome.likeliest_BWL
        rows = zip(token_BWL[at, :count], logp_BWL[at, :count], strict=True)
        done.likeliest.extend(_pairs(*row) for row in rows)
    done.steps += 1
    slot.progress.add(count)
    if record.width:
        slot.waited = 0 if verified else slot.waited + 1
    # What a plan left out of a request says nothing of it. And `kept` has the drafts of
    # requests that a stop string has ended meanwhile, `active` has not.
    if record.kept and record.teaches:
        share = verified * record.active / record.kept
        slot.ease.add(max(count - 1, 0), record.expected * share)
    done.accepted += accepted
    done.verified += verified
    record.committed += count
    record.accepted += accepted
    if outcome.finished_B[at] or end is not None:
        stopped = end is not None or done.tokens[-1] in slot.request.stop
        if broken and end is None:
            done.finish = "failed"
        else:
            done.finish = "stop" if stopped else "length"


def _pairs(token_L: np.ndarray, logp_L: np.ndarray) -> Likeliest:
    return tuple(zip(token_L.tolist(), logp_L.tolist(), strict=True))
