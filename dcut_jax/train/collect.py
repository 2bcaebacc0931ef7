"""From prompts to a dataset: the target's own responses, and its hidden states.

Two stages, each resumable. `responses` decodes greedily with the project's engine and
appends one JSON line per prompt; `features` runs finished documents through the target
once more, many positions at a time, and writes tokens and tapped hidden states in the
format of `train.data`.
"""

import gzip
import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcut_jax.decode.steps import Models
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.policy import ArPolicy
from dcut_jax.engine.requests import Completion, Request
from dcut_jax.prompts import read_prompt_file
from dcut_jax.train.data import DatasetError, DatasetWriter
from dcut_jax.train.features import make_features
from dcut_jax.weights.load import Target


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer, and the file that it came from."""

    messages: tuple[Mapping[str, str], ...]
    source: str


def read_prompts(paths: Sequence[Path], seed: int) -> list[Prompt]:
    """Prompts of files (see `prompts.load_prompts`), deduplicated and shuffled.

    Raises:
      PromptError: a file is missing, or a line holds no prompt; names file and line.
    """
    found: dict[str, Prompt] = {}
    for path in paths:
        for prompt in read_prompt_file(path):
            key = json.dumps(prompt.messages)
            found.setdefault(key, Prompt(prompt.messages, path.stem))
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
) -> int:
    """Appends the target's greedy answer to every prompt that `out` lacks.

    A line is `{"target", "source", "prompt", "response", "finish"}`: the target's
    identity, and token ids with the chat template applied.

    Returns:
      How many prompts were left out because `max_length` has no room for them and
      `max_new_tokens`.

    Raises:
      CheckpointError: the target has no tokenizer.
      DatasetError: `out` is compressed, is damaged, or has answers of another target;
        or logits of the target are not finite.
    """
    text = target.text()
    if out.suffix == ".gz":
        raise DatasetError(
            f"{out} is compressed, and answers are appended line by line; unpack it "
            f"and name the unpacked file"
        )
    there = read_responses(out, target) if out.exists() else []
    answered = {tuple(d["prompt"]) for d in there}
    _cut_unfinished_line(out)
    engine = Engine(
        Models(target.cfg, None, {"target": target.params}),
        EngineConfig(slots, max_length),
        ArPolicy(),
    )
    waiting: Iterator[Prompt] = iter(prompts)
    running: list[tuple[Prompt, tuple[int, ...], Completion]] = []
    exhausted, done, left_out = False, 0, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        while not exhausted or running:
            while not exhausted and engine.running < slots:
                prompt = next(waiting, None)
                if prompt is None:
                    exhausted = True
                    break
                ids = tuple(text.chat(list(prompt.messages)))
                too_long = len(ids) + max_new_tokens > max_length
                if ids in answered or too_long:
                    done += 1
                    left_out += ids not in answered
                    continue
                request = Request(ids, max_new_tokens, text.eos_ids)
                running.append((prompt, ids, engine.admit(engine.prefill(request))))
            if engine.running:
                engine.step()
            finished = [r for r in running if r[2].finish != "running"]
            running = [r for r in running if r[2].finish == "running"]
            for prompt, ids, completion in finished:
                if completion.finish == "failed":
                    raise DatasetError(
                        f"expected finite logits, found none after "
                        f"{len(completion.tokens)} tokens of an answer to a prompt of "
                        f"{prompt.source}; what was answered before is kept. Take a "
                        f"wider --dtype"
                    )
                line = {
                    "target": target.identity,
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
    return left_out


def _cut_unfinished_line(path: Path) -> None:
    """Removes what a killed writer left after the last complete line."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def read_responses(path: Path, target: Target | None = None) -> list[dict]:
    """Complete lines of a response file; an unfinished last line is passed over.

    Args:
      path: what `respond` wrote, or that packed by gzip (`.gz`).
      target: whose answers are expected. Lines that do not say whose they are, as
        earlier versions wrote them, are accepted if its vocabulary has their tokens.

    Raises:
      DatasetError: there is no such file, it is damaged, or a line is not a response,
        or one of another target; names file and line.
    """
    if not path.is_file():
        raise DatasetError(
            f"{path} does not exist; `python -m dcut_jax.train respond` makes responses"
        )
    found = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith("\n"):
                    break  # still being written
                found.append(_parse_response(line, f"{path}:{number}", target))
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise DatasetError(f"{path} is damaged: {e}; fetch it anew") from e
    return found


def _parse_response(line: str, where: str, target: Target | None) -> dict:
    try:
        response = json.loads(line)
    except json.JSONDecodeError:
        response = None
    there = response if isinstance(response, dict) else {}
    if not (_is_tokens(there.get("prompt")) and _is_tokens(there.get("response"))):
        raise DatasetError(
            f"{where}: expected a JSON object with token lists `prompt` and "
            f"`response`, found {line[:60]!r}; correct or drop this line"
        )
    if target is None:
        return there
    theirs = there.get("target", target.identity)
    if theirs != target.identity:
        raise DatasetError(
            f"{where}: expected answers of target {target.identity}, found one of "
            f"{theirs}; name that target, or another file"
        )
    vocab = target.cfg.vocab
    tokens = there["prompt"] + there["response"]
    beyond = next((t for t in tokens if not 0 <= t < vocab), None)
    if beyond is not None:
        raise DatasetError(
            f"{where}: expected tokens of the target's vocabulary, 0 to {vocab - 1}, "
            f"found {beyond}; these are answers of another tokenizer: name the target "
            f"that gave them, or another file"
        )
    return there


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def check_room(responses: Sequence[dict], writer: DatasetWriter) -> str:
    """What the documents that the writer lacks will take on disk, said before it does.

    Raises:
      DatasetError: there is less room.
    """
    left = responses[writer.documents :]
    tokens = sum(len(d["prompt"]) + len(d["response"]) for d in left)
    needed = tokens * writer.bytes_per_token
    free = shutil.disk_usage(writer.path).free
    text = (
        f"{len(left)} documents of {tokens} tokens take {needed / 1e9:.2f} GB at "
        f"{writer.bytes_per_token} bytes a token"
    )
    if needed > free:
        raise DatasetError(
            f"{writer.path}: {text}, and {free / 1e9:.2f} GB are free; make room, take "
            f"fewer taps, or leave features out (--no-features) and train with "
            f'features = "online"'
        )
    return text


def add_features(
    target: Target,
    taps: tuple[int, ...],
    responses: Sequence[dict],
    writer: DatasetWriter,
    *,
    batch: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Appends documents and the target's features of them, in the order of `responses`.

    Documents that the writer already has are passed over.

    Raises:
      DatasetError: those are not the first of these.
    """
    writer.require([(d["prompt"] + d["response"], len(d["prompt"])) for d in responses])
    if writer.channels == 0:
        for line in responses[writer.documents :]:
            writer.append(line["prompt"] + line["response"], len(line["prompt"]))
        return
    run = make_features(target.params, target.cfg, taps)
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
        found = run(token_NS, length_N)  # type: ignore[arg-type]
        features_NSC = np.concatenate([np.asarray(x) for x in found], axis=-1)
        for row, (line, document) in enumerate(zip(part, documents, strict=True)):
            features = features_NSC[row, : len(document)]
            writer.append(document, len(line["prompt"]), features)
        if on_progress:
            on_progress(start + len(part), len(responses))
