"""The words of a step's softmax, where the whole vocabulary would cost too much."""

import numpy as np

from dcut_jax.config import ConfigError
from dcut_jax.train.blocks import Blocks
from dcut_jax.train.config import TrainConfig
from dcut_jax.train.data import Dataset, Order
from dcut_jax.train.loss import Shortlist

PADDING = 0  # behind documents, and so among a step's words


def check_shortlist(cfg: TrainConfig, vocab: int, data: Dataset, order: Order) -> None:
    """Refuses a shortlist that some step of the run would not find room in.

    What a step sees is known beforehand, and a run that ends in one of its steps could
    never go on.

    Raises:
      ConfigError: with a size that does.
    """
    if cfg.shortlist > vocab:
        raise ConfigError(
            f"shortlist {cfg.shortlist}: expected at most the vocabulary, {vocab}; "
            f"take 0 for all of it"
        )
    if cfg.shortlist >= cfg.docs * cfg.length:
        return
    most = 0
    for number in range(cfg.steps):
        documents, length = order.of_step(number)
        for some in documents.reshape(cfg.accumulate, cfg.docs):
            seen = [data.document(i).tokens[:length] for i in some]
            most = max(most, len(np.unique(np.concatenate([[PADDING], *seen]))))
    if most > cfg.shortlist:
        raise ConfigError(
            f"shortlist {cfg.shortlist}: expected at least {most}, for so many "
            f"different words some step of this run has"
        )


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
