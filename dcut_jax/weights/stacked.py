"""Checkpoints that keep the experts of a layer in one tensor, read expert by expert.

transformers 5 has Qwen3-MoE's experts in two tensors of a layer in memory, and a file
may hold them so: `mlp.experts.gate_up_proj` `[Q, 2F, E]`, gates first, and
`mlp.experts.down_proj` `[Q, E, F]`. Published files have a tensor per expert.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.safetensors_io import TensorFiles

_PARTS = {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
}


class _Piece(NamedTuple):
    """Expert `q` of a stack, of which the name is one of `of` parts."""

    stack: str
    q: int
    part: int
    of: int


class Unstacked(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint, with a name per expert instead of each stack."""

    def __init__(self, tensors: TensorFiles):
        self._tensors = tensors
        self._pieces: dict[str, _Piece | None] = {}
        self._last: tuple[str, np.ndarray] | None = None
        for name in tensors:
            for piece_name, piece in self._unstack(name):
                if piece_name in self._pieces:
                    raise CheckpointError(
                        f"{tensors.file_of(name)}: tensor {piece_name} is there twice, "
                        f"in a stack and on its own"
                    )
                self._pieces[piece_name] = piece

    def _unstack(self, name: str) -> Iterator[tuple[str, _Piece | None]]:
        known = [end for end in _PARTS if name.endswith(end)]
        if not known:
            yield name, None
            return
        parts, layer = _PARTS[known[0]], name.removesuffix(known[0])
        value = self._stack(name)
        if value.ndim != 3 or value.shape[1] % len(parts):
            raise CheckpointError(
                f"{self._tensors.file_of(name)}: tensor {name} has shape "
                f"{list(value.shape)}; expected one matrix per expert"
                + (", gates and ups of one size" if len(parts) > 1 else "")
            )
        for q in range(value.shape[0]):
            for i, part in enumerate(parts):
                expert = f"{layer}mlp.experts.{q}.{part}.weight"
                yield expert, _Piece(name, q, i, len(parts))

    def _stack(self, name: str) -> np.ndarray:
        """A whole stack; the last is kept, since its parts are asked for in turn."""
        if self._last is None or self._last[0] != name:
            self._last = name, self._tensors[name]
        return self._last[1]

    def __getitem__(self, name: str) -> np.ndarray:
        piece = self._pieces[name]
        if piece is None:
            return self._tensors[name]
        return np.split(self._stack(piece.stack)[piece.q], piece.of)[piece.part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        piece = self._pieces[name]
        return self._tensors.file_of(name if piece is None else piece.stack)


def unstacked(tensors: TensorFiles) -> Unstacked:
    """The same tensors, a name per expert.

    Raises:
      CheckpointError: a stack does not hold one matrix per expert, or an expert is
        there on its own too.
    """
    return Unstacked(tensors)
