"""From prompts to a dataset: the target's own responses, and its hidden states.

Two stages, each resumable. `responses` decodes greedily with the project's engine and
appends one JSON line per prompt; `features` runs finished documents through the target
once more, many positions at a time, and writes tokens and tapped hidden states in the
format of `train.data`.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.decode.steps import Models
from dcut_jax.engine.engine import Engine, EngineConfig
from dcut_jax.engine.policy import ArPolicy
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.models import dense, params
from dcut_jax.train.data import DatasetError, DatasetWriter
from dcut_jax.weights.load import Target


@dataclass(frozen=True)
class Prompt:
    """A first user message, and the file that it came from."""

    text: str
    source: str


def read_prompts(paths: Sequence[Path], seed: int) -> list[Prompt]:
    """Prompts of JSON-lines files (`prompt` in each line), deduplicated and shuffled.

    Raises:
      DatasetError: a line is not JSON or has no prompt; names file and line.
    """
    found: dict[str, Prompt] = {}
    for path in paths:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = json.loads(line)["prompt"]
                except (json.JSONDecodeError, KeyError, TypeError) as e:
                    raise DatasetError(
                        f"{path}:{number}: expected a JSON object with `prompt`, "
                        f"found {line[:60]!r}"
                    ) from e
                found.setdefault(text, Prompt(text, path.stem))
    prompts = list(found.values())
    random.Random(seed).shuffle(prompts)
    return prompts


def respond(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    slots: int,
    max_length: int,
    max_new_tokens: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Appends the target's greedy answer to every prompt that `out` lacks.

    A line is `{"source", "prompt", "response", "finish"}`, token ids with the chat
    template applied. Prompts too long for `max_length` are left out.
    """
    text = target.text()
    answered = {tuple(d["prompt"]) for d in read_responses(out)}
    _cut_unfinished_line(out)
    engine = Engine(
        Models(target.cfg, None, {"target": target.params}),
        EngineConfig(slots, max_length),
        ArPolicy(),
    )
    waiting: Iterator[Prompt] = iter(prompts)
    running: list[tuple[Prompt, tuple[int, ...], Completion]] = []
    exhausted, done = False, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        while not exhausted or running:
            while not exhausted and engine.running < slots:
                prompt = next(waiting, None)
                if prompt is None:
                    exhausted = True
                    break
                ids = tuple(text.chat([{"role": "user", "content": prompt.text}]))
                if ids in answered or len(ids) + max_new_tokens > max_length:
                    done += 1
                    continue
                request = Request(ids, max_new_tokens, text.eos_ids)
                running.append((prompt, ids, engine.admit(engine.prefill(request))))
            if engine.running:
                engine.step()
            finished = [r for r in running if r[2].finish != "running"]
            running = [r for r in running if r[2].finish == "running"]
            for prompt, ids, completion in finished:
                line = {
                    "source": prompt.source,
                    "prompt": list(ids),
                    "response": completion.tokens,
                    "finish": completion.finish,
                }
                file.write(json.dumps(line) + "\n")
            if finished:
                file.flush()
                done += len(finished)
                if on_progress:
                    on_progress(done, len(prompts))
    if on_progress:
        on_progress(done, len(prompts))


def _cut_unfinished_line(path: Path) -> None:
    """Removes what a killed writer left after the last complete line."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def read_responses(path: Path) -> list[dict]:
    """Complete lines of a response file; an unfinished last line is passed over.

    Raises:
      DatasetError: a line is not a response; names file and line.
    """
    if not path.exists():
        return []
    found = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break  # still being written
            try:
                response = json.loads(line)
                _ = response["prompt"] + response["response"]
            except (json.JSONDecodeError, KeyError, TypeError) as e:
                raise DatasetError(
                    f"{path}:{number}: expected a JSON object with token lists "
                    f"`prompt` and `response`, found {line[:60]!r}"
                ) from e
            found.append(response)
    return found


def add_features(
    target: Target,
    taps: tuple[int, ...],
    responses: Sequence[dict],
    writer: DatasetWriter,
    *,
    batch: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Appends documents and their tapped hidden states, in the order of `responses`.

    Weights are read in bfloat16: the features are stored in it anyway. Documents
    that the writer already has are passed over.
    """
    weights = params.cast(target.params, jnp.bfloat16)

    @partial(jax.jit, static_argnames="width")
    def run(token_NS: jax.Array, length_N: jax.Array, width: int) -> jax.Array:
        valid_NS = jnp.arange(width)[None] < length_N[:, None]
        rows = dense.forward_sequences(weights, target.cfg, token_NS, valid_NS, taps)
        return rows.taps.astype(jnp.bfloat16)

    for start in range(writer.documents, len(responses), batch):
        part = responses[start : start + batch]
        documents = [d["prompt"] + d["response"] for d in part]
        longest = max(len(d) for d in documents)
        width = -(-longest // 64) * 64  # few shapes, so that few programs compile
        token_NS = np.zeros((batch, width), np.int32)
        length_N = np.zeros(batch, np.int32)
        for row, document in enumerate(documents):
            token_NS[row, : len(document)] = document
            length_N[row] = len(document)
        taps_NSC = np.asarray(run(token_NS, length_N, width))
        for row, (line, document) in enumerate(zip(part, documents, strict=True)):
            features = taps_NSC[row, : len(document)]
            writer.append(document, len(line["prompt"]), features)
        if on_progress:
            on_progress(start + len(part), len(responses))
