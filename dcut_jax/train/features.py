"""Turns the target's responses into a dataset with features.

Input is a JSONL file, one document a line: `prompt` and `response`, lists of token ids.
The target reads each document once and the hidden states after the tapped layers are
stored, so that training never runs the target.
"""

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcut_jax.models.dense import forward_sequences
from dcut_jax.train.data import DatasetError, DatasetWriter
from dcut_jax.weights.load import Target


def read_responses(path: str | Path) -> Iterator[tuple[list[int], int]]:
    """`(tokens, prompt_len)` of every complete line.

    Raises:
      DatasetError: a line is not a document.
    """
    with open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # still being written
            try:
                raw = json.loads(line)
                prompt, response = list(raw["prompt"]), list(raw["response"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise DatasetError(
                    f"{path}:{number}: expected an object with token lists `prompt` "
                    f"and `response`: {error}"
                ) from error
            yield prompt + response, len(prompt)


def write_features(
    target: Target,
    responses: str | Path,
    out: str | Path,
    taps: tuple[int, ...],
    about: dict[str, Any],
    length: int = 384,
    batch: int = 8,
) -> int:
    """Writes, or continues, a dataset from a file of responses.

    Documents go in the order of their lines, and the ones that the dataset has already
    are passed over: calling this again, after a kill or when the file has grown, adds
    what is missing.

    Args:
      about: what goes into the manifest beside target and taps: sampling, sources with
        their licences.
      length: documents are cut to this many tokens.
      batch: documents of one forward pass.

    Returns:
      Documents in the dataset.
    """

    @partial(jax.jit, static_argnames="taps")
    def features(params, token_NS, length_N, taps):
        valid_NS = jnp.arange(token_NS.shape[1])[None] < length_N[:, None]
        rows = forward_sequences(params, target.cfg, token_NS, valid_NS, taps)
        return rows.taps.astype(jnp.bfloat16)

    manifest = {"target": target.name, "target_identity": target.identity}
    manifest |= {"taps": list(taps), "length": length} | about
    channels = len(taps) * target.cfg.embed
    with DatasetWriter(out, manifest, channels) as writer:
        todo = itertools.islice(read_responses(responses), writer.documents, None)
        while some := list(itertools.islice(todo, batch)):
            cut = [(tokens[:length], min(p, length)) for tokens, p in some]
            longest = max(len(tokens) for tokens, _ in cut)
            # A multiple of 128 keeps the number of compilations small.
            token_NS = np.zeros((batch, -(-longest // 128) * 128), np.int32)
            length_N = np.ones(batch, np.int32)
            for n, (tokens, _) in enumerate(cut):
                token_NS[n, : len(tokens)] = tokens
                length_N[n] = len(tokens)
            taps_NSC = np.asarray(features(target.params, token_NS, length_N, taps))
            for n, (tokens, prompt_len) in enumerate(cut):
                writer.append(tokens, prompt_len, taps_NSC[n, : len(tokens)])
            print(f"{writer.documents} documents, {writer.tokens} tokens", flush=True)
        return writer.documents
