"""The words of a step's softmax, where the whole vocabulary would cost too much."""

import numpy as np

from dcut_jax.config import ConfigError
from dcut_jax.train.blocks import Blocks
from dcut_jax.train.loss import Shortlist


def make_shortlist(
    blocks: Blocks,
    frequent: np.ndarray,
    size: int,
    vocab: int,
    rng: np.random.Generator,
) -> Shortlist:
    """The words of one step's softmax: its labels, frequent words, random others.

    Raises:
      ConfigError: the step's tokens alone are more than `size`.
    """
    sure = np.zeros(vocab, bool)
    sure[np.asarray(blocks.token_NS)] = True
    sure[frequent] = True
    words = np.flatnonzero(sure)
    if len(words) > size:
        # Frequent words that are not labels give way.
        sure[:] = False
        sure[np.asarray(blocks.token_NS)] = True
        words = np.flatnonzero(sure)
        if len(words) > size:
            raise ConfigError(
                f"a step has {len(words)} different tokens; shortlist {size} is too "
                f"small for them"
            )
    others = np.flatnonzero(~sure)
    drawn = rng.choice(others, size - len(words), replace=False)
    bias = np.zeros(size, np.float32)
    if len(drawn):
        bias[len(words) :] = np.log(len(others) / len(drawn))
    words = np.concatenate([words, drawn]).astype(np.int32)
    place = np.zeros(vocab, np.int32)
    place[words] = np.arange(size, dtype=np.int32)
    return Shortlist(words, place, bias)  # type: ignore[arg-type]
