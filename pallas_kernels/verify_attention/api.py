"""What callers use: grouped queries against their requests' pages and fresh rows."""

from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import Backend, known
from pallas_kernels.verify_attention import cudnn, kernel, reference
from pallas_kernels.verify_attention.softmax import Pages, first_seen


def verify_attention(
    q_BJHD: Float[Array, "B J H D"],
    k_BSGD: Float[Array, "B S G D"],
    v_BSGD: Float[Array, "B S G D"],
    mask_BJS: Bool[Array, "B J S"],
    pages: Pages,
    *,
    backend: Backend,
    position_BJ: Int32[Array, "B J"] | None = None,
    window: int | None = None,
) -> Float32[Array, "B J H D"]:
    """Grouped-query attention with one softmax over cached and fresh keys.

    Verification, a prompt's chunks and a drafter's block differ in the mask over fresh
    keys alone; every row sees all that is cached of its request, or as far back as a
    window goes.

    Args:
      q_BJHD: queries of B groups of J rows, unscaled. H is a multiple of G.
      k_BSGD, v_BSGD: fresh keys and values of each group, in no page yet; finite, also
        where no row sees them.
      mask_BJS: which fresh keys a row sees. Each row must see at least one, its own.
      pages: the cache. Products are in the dtype of the keys and values they are with,
        cached or fresh, float32 ones with all their bits; sums are float32.
      position_BJ: positions of the rows; needed with `window`.
      window: if set, a cached key at `k` is seen only while `position - k < window`.
        (The mask states the same for fresh keys.)

    Raises:
      ValueError: a backend that this does not have; a window without positions; a
        program that is lowered for what does not run it; "cudnn", and pages that are
        not in 16 bits.
      RuntimeError: "cudnn", where it is not installed.
    """
    known("attention", backend)
    since_BJ = first_seen(position_BJ, window)
    args = q_BJHD, k_BSGD, v_BSGD, mask_BJS, pages, since_BJ
    if backend == "xla":
        return reference.attend(*args)
    if backend == "cudnn":
        return cudnn.attend(*args)
    return kernel.attend(*args, backend=backend)
