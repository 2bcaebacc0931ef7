"""Training documents on disk, mapped into memory.

A dataset is a directory:

* `manifest.json`: what the documents are (target, sampling, sources and their licences,
  tapped layers), and `channels` and `feature_dtype` of the features.
* `tokens.bin`: int32, all documents end to end, prompt and response.
* `features.bin`: bfloat16 or float16, `[positions, channels]`, the tapped hidden states
  of the target at the same positions, and behind them, where the manifest says
  `hidden_channels`, its last hidden states; empty where `channels` is 0.
* `index.bin`: int64 `[documents, 3]`: start in `tokens.bin`, length of the prompt,
  length of the document.

Everything is little-endian. The index entry of a document is written last, so whatever
lies past the last entry's end belongs to an unfinished document, and is cut when a
writer opens the directory again. Readers may open it while it grows; they keep what
they saw.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import jax.numpy as jnp
import numpy as np

from dcut_jax.files import write_text
from dcut_jax.train.blocks import Blocks

FEATURE_DTYPES = {"bfloat16": jnp.dtype(jnp.bfloat16), "float16": np.dtype("<f2")}
MANIFEST, TOKENS, FEATURES, INDEX = (
    "manifest.json",
    "tokens.bin",
    "features.bin",
    "index.bin",
)


class DatasetError(ValueError):
    """A dataset that is missing, damaged, or not what its user expects."""


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """Keys in which two JSON objects differ, each with a text that has both values."""

    def value(of: Mapping[str, Any], key: str) -> str:
        return json.dumps(of[key]) if key in of else "absent"

    return {
        key: f"{key} ({value(there, key)} there, {value(here, key)} here)"
        for key in sorted(there.keys() | here.keys())
        if (key in there) != (key in here) or there[key] != here[key]
    }


def _read_index(path: Path) -> np.ndarray:
    """Complete entries of the index, `[documents, 3]`."""
    raw = np.fromfile(path / INDEX, "<i8") if (path / INDEX).exists() else np.empty(0)
    return raw[: raw.size // 3 * 3].astype(np.int64).reshape(-1, 3)


class DatasetWriter:
    """Appends documents; opening an existing directory continues after its last one.

    Args:
      manifest: JSON-ready description; that of the directory, if it exists.
      channels: width of the features of one position, 0 for a dataset without.

    Raises:
      DatasetError: the directory holds another dataset.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: Mapping[str, Any],
        channels: int = 0,
        feature_dtype: str = "bfloat16",
    ):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.channels = channels
        self._dtype = FEATURE_DTYPES[feature_dtype]
        full = dict(manifest) | {"channels": channels, "feature_dtype": feature_dtype}
        full = json.loads(json.dumps(full))
        if (self.path / MANIFEST).exists():
            there = json.loads((self.path / MANIFEST).read_text())
            differ = differences(there, full)
            if differ:
                raise DatasetError(
                    f"{self.path} holds another dataset; its manifest differs in "
                    f"{', '.join(differ.values())}; go on with what it was made with, "
                    f"or write to a fresh directory"
                )
        else:
            write_text(self.path / MANIFEST, json.dumps(full, indent=1) + "\n")
        index = _read_index(self.path)
        self.documents = len(index)
        self.tokens = int(index[-1, 0] + index[-1, 2]) if len(index) else 0
        sizes = {
            TOKENS: self.tokens * 4,
            FEATURES: self.tokens * channels * 2,
            INDEX: self.documents * 24,
        }
        for name, size in sizes.items():
            (self.path / name).touch()
            there_bytes = (self.path / name).stat().st_size
            if there_bytes < size:
                raise DatasetError(
                    f"{self.path / name} has {there_bytes} bytes, the index speaks of "
                    f"{size}"
                )
        self._tokens, self._features, self._index = (
            self._continue(name, size) for name, size in sizes.items()
        )

    def require(self, documents: Sequence[tuple[Sequence[int], int]]) -> None:
        """Sees that what is there is the beginning of `documents`.

        Args:
          documents: the tokens of each, and how many of them are the prompt.

        Raises:
          DatasetError: it is not; to go on would leave some out and keep others.
        """
        index = _read_index(self.path)
        tokens = np.fromfile(self.path / TOKENS, "<i4", count=self.tokens)
        for number, (start, prompt_len, length) in enumerate(index.tolist()):
            if number < len(documents):
                wanted, prompt = documents[number]
                there = tokens[start : start + length]
                if prompt == prompt_len and np.array_equal(there, wanted):
                    continue
            raise DatasetError(
                f"{self.path}: expected document {number + 1} to be that of the "
                f"responses, which it was begun with, found another; write to a fresh "
                f"directory"
            )

    @property
    def bytes_per_token(self) -> int:
        """What a token takes on disk, with its features."""
        return 4 + 2 * self.channels

    def _continue(self, name: str, size: int) -> BinaryIO:
        """Opens a file behind its last complete document, and cuts the rest."""
        file = open(self.path / name, "r+b")
        file.truncate(size)
        file.seek(size)
        return file

    def append(
        self, tokens: Any, prompt_len: int, features: np.ndarray | None = None
    ) -> None:
        """Adds one document: prompt and response, and features of every position.

        Raises:
          DatasetError: its lengths do not fit each other, or the dataset's channels.
        """
        token_S = np.asarray(tokens, "<i4")
        if not 0 < prompt_len <= token_S.size:
            raise DatasetError(
                f"a prompt of {prompt_len} tokens in a document of {token_S.size}"
            )
        if (features is None) != (self.channels == 0):
            raise DatasetError(
                f"the dataset has {self.channels} channels of features, the document "
                f"{'none' if features is None else 'some'}"
            )
        if features is not None:
            if features.shape != (token_S.size, self.channels):
                raise DatasetError(
                    f"features are {list(features.shape)}, expected "
                    f"{[token_S.size, self.channels]}"
                )
            self._features.write(np.asarray(features).astype(self._dtype).tobytes())
        self._tokens.write(token_S.tobytes())
        self._features.flush()
        self._tokens.flush()
        entry = np.array([self.tokens, prompt_len, token_S.size], "<i8")
        self._index.write(entry.tobytes())
        self._index.flush()
        self.tokens += token_S.size
        self.documents += 1

    def close(self) -> None:
        """Closes the files; what was appended is complete without this."""
        for file in (self._tokens, self._features, self._index):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Document:
    """One document: `features` is None in a dataset without them."""

    tokens: np.ndarray
    prompt_len: int
    features: np.ndarray | None


@dataclass(frozen=True)
class Dataset:
    """A dataset opened for reading.

    Attributes:
      index: `[documents, 3]`: start, prompt length, length.
    """

    path: Path
    manifest: dict[str, Any]
    index: np.ndarray
    tokens: np.ndarray
    features: np.ndarray | None

    @classmethod
    def open(cls, path: str | Path) -> "Dataset":
        """Maps a dataset's files.

        Raises:
          DatasetError: a file is missing or shorter than the index says.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise DatasetError(f"{path / MANIFEST} does not exist; is this a dataset?")
        manifest = json.loads((path / MANIFEST).read_text())
        index = _read_index(path)
        if not len(index):
            raise DatasetError(f"{path} has no documents")
        total = int(index[-1, 0] + index[-1, 2])
        channels = int(manifest["channels"])

        def mapped(name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            if (path / name).stat().st_size < size:
                raise DatasetError(f"{path / name} is shorter than the index says")
            return np.memmap(path / name, dtype, "r", shape=shape)

        features = None
        if channels:
            dtype = FEATURE_DTYPES[manifest["feature_dtype"]]
            features = mapped(FEATURES, dtype, (total, channels))
        return cls(path, manifest, index, mapped(TOKENS, "<i4", (total,)), features)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def hidden_channels(self) -> int:
        """How many of the last channels are the target's last hidden states."""
        return int(self.manifest.get("hidden_channels", 0))

    def document(self, i: int) -> Document:
        """One document, its arrays views of the mapped files."""
        start, prompt_len, length = (int(x) for x in self.index[i])
        rows = slice(start, start + length)
        features = None if self.features is None else self.features[rows]
        return Document(self.tokens[rows], prompt_len, features)

    def usable(self, length: int) -> np.ndarray:
        """Documents with at least one legal anchor in their first `length` tokens."""
        end = np.minimum(self.index[:, 2], length)
        return np.flatnonzero(end - 1 > self.index[:, 1])

    def draws(self, seed: int) -> np.ndarray:
        """A number in [0, 1) for each document, uniform over prompts, `[documents]`.

        It is a hash of seed and prompt, so it depends neither on a document's place nor
        on the others: what is chosen by `draws(seed) < fraction` stays chosen however
        the dataset grows, and documents of one prompt are chosen together.
        """
        out = np.empty(len(self))
        for i, (start, prompt_len, _) in enumerate(self.index):
            digest = hashlib.sha256(f"{seed};".encode())
            digest.update(self.tokens[start : start + prompt_len].tobytes())
            out[i] = int.from_bytes(digest.digest()[:6], "big") / 2**48
        return out

    def counts(self, vocab: int) -> np.ndarray:
        """How often each token occurs, `[vocab]`."""
        return np.bincount(self.tokens, minlength=vocab)


def draw_blocks(
    data: Dataset,
    documents: np.ndarray,
    anchors: int,
    length: int,
    rng: np.random.Generator,
) -> Blocks:
    """Anchors of some documents, cut to `length` tokens and padded to it.

    An anchor is a position of the response that has a successor. Drawn without
    replacement, in order; a document with fewer than `anchors` has the rest invalid.
    Features are there if the dataset has them.
    """
    N, S = len(documents), length
    token_NS = np.zeros((N, S), np.int32)
    length_N = np.zeros(N, np.int32)
    anchor_NA = np.zeros((N, anchors), np.int32)
    valid_NA = np.zeros((N, anchors), bool)
    features: np.ndarray | None = None
    if data.features is not None:
        features = np.zeros((N, S, data.features.shape[1]), data.features.dtype)
    for n, i in enumerate(documents):
        doc = data.document(int(i))
        size = min(len(doc.tokens), S)
        token_NS[n, :size] = doc.tokens[:size]
        if features is not None and doc.features is not None:
            features[n, :size] = doc.features[:size]
        length_N[n] = size
        legal = np.arange(doc.prompt_len, size - 1)
        count = min(anchors, len(legal))
        anchor_NA[n, :count] = np.sort(rng.choice(legal, count, replace=False))
        valid_NA[n, :count] = True
    # NumPy arrays: they reach the device as arguments of the compiled step.
    blocks: Any = Blocks(token_NS, length_N, None, anchor_NA, valid_NA)  # type: ignore[arg-type]
    if features is None:
        return blocks
    taps = features.shape[2] - data.hidden_channels
    hidden = features[..., taps:] if data.hidden_channels else None
    return replace(blocks, taps_NSC=features[..., :taps], hidden_NSE=hidden)


class Order:
    """Which documents a step trains on: in every epoch all, in an order of its own.

    Documents of a step are of one length, so that little is padding: each goes to the
    shortest of `lengths` that holds it, what is longer is cut. A length's documents
    that are too few for a step, or left over in an epoch, go with the next longer one;
    those left over in the end wait for the next epoch, whose order is another.

    A function of the step alone, so a resumed run sees what an unbroken one would.

    Args:
      index: of a dataset's documents, those that may be drawn.
      size: of each of them, tokens.
      per_step: documents of a step.

    Raises:
      DatasetError: there are none.
    """

    def __init__(
        self,
        index: np.ndarray,
        size: np.ndarray,
        per_step: int,
        lengths: Sequence[int],
        seed: int,
    ) -> None:
        if not len(index):
            raise DatasetError("there are no documents to train on")
        # Few documents are taken more than once in a step.
        repeats = -(-per_step // len(index))
        self._index = np.tile(index, repeats)
        self._size = np.tile(size, repeats)
        self._per_step = per_step
        self._lengths = tuple(lengths)
        self._seed = seed
        self.steps_per_epoch = len(self._index) // per_step
        self._epoch: tuple[int, list[tuple[np.ndarray, int]]] | None = None

    def of_step(self, step: int) -> tuple[np.ndarray, int]:
        """The documents of a step, and the length that they are padded to."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        return self._epoch[1][at]

    def _shuffled(self, epoch: int) -> list[tuple[np.ndarray, int]]:
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._index))
        held = np.minimum(self._size[order], self._lengths[-1])
        place = np.searchsorted(self._lengths, held)
        steps: list[tuple[np.ndarray, int]] = []
        left = order[:0]
        for b, length in enumerate(self._lengths):
            some = np.concatenate([left, order[place == b]])
            full = len(some) // self._per_step * self._per_step
            left = some[full:]
            for batch in some[:full].reshape(-1, self._per_step):
                steps.append((self._index[batch], length))
        return [steps[i] for i in rng.permutation(len(steps))]
