"""What callers use: from hidden states and a head to the best word of each row."""

from jaxtyping import Array, Float

from pallas_kernels.backends import Backend, known
from pallas_kernels.confidence import kernel
from pallas_kernels.confidence.partial import Confidence
from pallas_kernels.confidence.reference import first_word, partial_of_head, whole

__all__ = ["Confidence", "head_confidence"]


def head_confidence(
    hidden_NE: Float[Array, "N E"],
    head_VE: Float[Array, "V E"],
    *,
    backend: Backend,
    chunk: int | None,
    over: str | None = None,
) -> Confidence:
    """Arg-max, its log-probability, the margin and the log-sum-exp of each row.

    Args:
      hidden_NE: any dtype; products are taken in that of the head, in float32 with all
        its bits, and summed in float32.
      chunk: words that "xla" takes at a time, so that of the logits no more than
        `[N, chunk]` is ever there; None: all at once. The kernel has blocks of its own.
      over: inside `shard_map`, the mesh axis that the vocabulary is cut over: the head
        is then a shard's, equally many words on each, and rows are the same on all.

    Returns:
      The lowest word on ties, of shards too. A row with a NaN or +inf among its logits,
      or with nothing above -inf, has NaN statistics and some valid word.

    Raises:
      ValueError: an unknown backend; `backend` has no kernel of this; a program that is
        lowered for what does not run it.
    """
    known("confidence", backend)
    first = first_word(head_VE.shape[0], over)
    if backend == "xla":
        found = partial_of_head(hidden_NE, head_VE, first, chunk)
    else:
        found = kernel.partial_of_head(hidden_NE, head_VE, first, backend=backend)
    return whole(found, over)
