"""Every kernel against its form in XLA, and against the least that it could take.

    python -m pallas_kernels.bench

On a GPU or a TPU: medians, and the floor, which is the bytes that must move at this
device's copy bandwidth or the arithmetic at its rate of large products, both measured
first, whichever is longer. On a CPU no speed is claimed: results are compared with the
reference, in the interpreter, and the kernels are lowered for both platforms.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import RUNS_ON, Backend, device_kind
from pallas_kernels.budget_topk import budget_topk
from pallas_kernels.confidence import head_confidence
from pallas_kernels.targets import export_for
from pallas_kernels.verify_attention import Pages, verify_attention

REPEATS = 30
IN_FLIGHT = 10  # calls between two waits, so that starting them is not what is timed


@dataclass(frozen=True)
class Work:
    """One operation at one size.

    Attributes:
      run: of a backend; the rest are its arguments.
      bytes, flops: what any form of it must at least move and work out.
      kernels: backends that it has beside XLA.
      tolerance: of floats, where they are compared with those of XLA's form.
    """

    name: str
    run: Callable[[Backend], Callable[..., Any]]
    args: Callable[[], tuple[Any, ...]]
    bytes: int
    flops: int
    kernels: tuple[Backend, ...]
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Record:
    """What was found of one form; times only where a device was timed.

    Attributes:
      checked: "equal", the largest difference from XLA's form, or the error that it
        ended with; "" where not run.
      lowered: whether the program could be made for the backend's platform.
    """

    work: str
    backend: str
    checked: str = ""
    lowered: bool | None = None
    median_ms: float | None = None
    floor_ms: float | None = None


def topk_work(B: int, K: int, R: int) -> Work:
    """`budget_topk` of log-survivals as a drafter gives them."""

    def args() -> tuple[Any, ...]:
        confidence_BK = np.random.default_rng(0).uniform(0.2, 1.0, (B, K))
        logs_BK = np.log(confidence_BK).cumsum(axis=1)
        budget_R = np.linspace(0, B * K, R).astype(np.int32)
        return jnp.asarray(logs_BK, jnp.float32), jnp.ones(B, bool), budget_R

    return Work(
        name=f"budget_topk {B}x{K}, {R} budgets",
        run=lambda backend: partial(budget_topk, backend=backend),
        args=args,
        bytes=4 * (B * K + R * B + 2 * R),
        flops=0,  # counting bits is no arithmetic of the kind that is timed
        kernels=("pallas_tpu", "pallas_mosaic_gpu"),
    )


def confidence_work(N: int, E: int, V: int) -> Work:
    """`head_confidence` of a head in bfloat16."""

    def args() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0))
        hidden_NE = jax.random.normal(keys[0], (N, E), jnp.float32)
        return hidden_NE, jax.random.normal(keys[1], (V, E), jnp.bfloat16)

    return Work(
        name=f"confidence {N}x{E}, {V} words",
        run=lambda backend: partial(head_confidence, backend=backend, chunk=8192),
        args=args,
        bytes=2 * V * E + 4 * N * E,
        flops=2 * N * E * V,
        kernels=("pallas_tpu",),
    )


def attention_work(
    B: int, J: int, context: int, H: int, G: int, D: int, page: int = 128
) -> Work:
    """`verify_attention` of requests of `context / 2` to `context` cached positions."""
    lengths = np.linspace(context // 2, context, B).astype(np.int32)
    columns = -(-context // page)

    def args() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 5)

        def values(key: Any, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
            return jax.random.normal(key, shape, dtype)

        fresh = values(keys[1], B, J, G, D), values(keys[2], B, J, G, D)
        mask_BJJ = np.broadcast_to(np.tril(np.ones((J, J), bool))[None], (B, J, J))
        table = np.random.default_rng(0).permutation(B * columns)
        return (
            values(keys[0], B, J, H, D, dtype=jnp.float32),
            *fresh,
            jnp.asarray(mask_BJJ),
            values(keys[3], 1, B * columns, G, D, page),
            values(keys[4], 1, B * columns, G, page, D),
            jnp.asarray(table.reshape(B, columns), jnp.int32),
            jnp.asarray(lengths),
        )

    def run(backend: Backend) -> Callable[..., Any]:
        def attend(q, k, v, mask, k_pages, v_pages, page_BN, length_B):
            pages = Pages(k_pages, v_pages, 0, page_BN, length_B)
            return verify_attention(q, k, v, mask, pages, backend=backend)

        return attend

    seen = int(lengths.sum()) + B * J  # keys and values that have to be read
    return Work(
        name=f"attention {B}x{J} over {context}, {H}/{G}x{D}",
        run=run,
        args=args,
        bytes=2 * 2 * seen * G * D + 2 * 4 * B * J * H * D,
        flops=4 * seen * J * H * D,
        kernels=("pallas_tpu", "cudnn"),
        tolerance=1e-2,  # weights are rounded to bfloat16 before they meet values
    )


WORKS = (
    topk_work(16, 15, 8),
    topk_work(64, 15, 8),
    topk_work(512, 31, 16),
    confidence_work(64, 2048, 151936),
    confidence_work(512, 4096, 151936),
    confidence_work(4096, 4096, 151936),
    attention_work(16, 16, 2048, 32, 8, 128),
    attention_work(64, 1, 4096, 32, 8, 128),
    attention_work(64, 8, 4096, 32, 4, 128),
    attention_work(256, 4, 1024, 32, 8, 128),
)
SMALL_WORKS = (
    topk_work(16, 7, 4),
    confidence_work(8, 64, 1300),
    attention_work(2, 3, 20, 4, 2, 16, page=8),
)


def difference(got: Any, want: Any, tolerance: float = 1e-4) -> str:
    """ "equal" where integers are and floats nearly; else how far apart they are."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        got_X, want_X = np.asarray(a, np.float64), np.asarray(b, np.float64)
        with np.errstate(invalid="ignore"):  # of two infinities
            apart_X = np.abs(got_X - want_X)
        allowed = 0.0 if np.issubdtype(a.dtype, np.integer) else tolerance
        # What is no number is near nothing.
        wrong_X = ~(apart_X <= allowed) & (got_X != want_X)
        if wrong_X.any():
            apart = np.nan_to_num(apart_X[wrong_X], nan=np.inf, posinf=np.inf)
            worst = max(worst, float(apart.max()))
    return "equal" if worst == 0.0 else f"differs by {worst:.3g}"


# cuDNN is left out: without the library JAX does not lower a call of it.
LOWERED_FOR: dict[Backend, str] = {"pallas_tpu": "tpu", "pallas_mosaic_gpu": "cuda"}


def check_on_cpu(works: Sequence[Work], platforms: Sequence[str]) -> Iterator[Record]:
    """Results in the interpreter, and lowering for devices that are not there."""
    for work in works:
        args = work.args()
        want = jax.jit(work.run("xla"))(*args)
        got = jax.jit(work.run("pallas_interpret"))(*args)
        checked = difference(got, want, work.tolerance)
        yield Record(work.name, "pallas_interpret", checked=checked)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        for backend in work.kernels:
            platform = LOWERED_FOR.get(backend, "nothing")
            if platform in platforms:
                text = export_for(platform, work.run(backend), *shapes)
                yield Record(work.name, backend, lowered="custom_call" in text)


def time_here(works: Sequence[Work], device: Any) -> Iterator[Record]:
    """Medians on this device, with what XLA's form takes and the floor."""
    bytes_per_ms, flops_per_ms = copy_rate(), product_rate()
    here = [b for b, kinds in RUNS_ON.items() if device_kind(device) in kinds]
    for work in works:
        args = work.args()
        floor_ms = max(work.bytes / bytes_per_ms, work.flops / flops_per_ms)
        want = jax.jit(work.run("xla"))(*args)
        for backend in ("xla", *(b for b in work.kernels if b in here)):
            try:
                run = jax.jit(work.run(backend))
                checked = difference(run(*args), want, work.tolerance)
                median_ms = timed(run, *args)
            except Exception as error:  # or one that fails would hide the others
                words = " ".join(str(error).split())[:200]
                yield Record(work.name, backend, checked=f"fails: {words}")
                continue
            yield Record(
                work=work.name,
                backend=backend,
                checked=checked,
                median_ms=median_ms,
                floor_ms=floor_ms,
            )


def timed(run: Callable[..., Any], *args: Any) -> float:
    """Median time of a call in ms, of calls that follow one another."""
    jax.block_until_ready(run(*args))
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([run(*args) for _ in range(IN_FLIGHT)])
        found.append((time.perf_counter() - start) * 1e3 / IN_FLIGHT)
    return median(found)


def copy_rate() -> float:
    """Bytes that this device reads and writes per ms."""
    x = jnp.zeros(128 << 20, jnp.float32)
    return 2 * x.nbytes / timed(jax.jit(lambda x: x + 1.0), x)


def product_rate() -> float:
    """Operations per ms of a large product in bfloat16."""
    n = 8192
    x = jnp.ones((n, n), jnp.bfloat16)
    return 2 * n**3 / timed(jax.jit(lambda x: x @ x), x)


def table(records: Sequence[Record]) -> str:
    """For people."""
    lines = [f"{'work':38}{'backend':20}{'result':22}{'ms':>9}{'floor':>9}{'share':>8}"]
    for r in records:
        result = r.checked or ("lowers" if r.lowered else "does not lower")
        times = ""
        if r.median_ms is not None and r.floor_ms is not None:
            share = r.floor_ms / r.median_ms
            times = f"{r.median_ms:9.4f}{r.floor_ms:9.4f}{share:8.0%}"
        lines.append(f"{r.work:38}{r.backend:20}{result:22}{times}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a result is wrong or a kernel does not lower."""
    args = parser().parse_args(argv)
    device = jax.devices()[0]
    works = SMALL_WORKS if args.small or device.platform == "cpu" else WORKS
    if device.platform == "cpu":
        print("A CPU: results and lowering are checked; no speed is claimed.")
        records = list(check_on_cpu(works, args.lower))
    else:
        records = list(time_here(works, device))
    print(table(records))
    bad = [r for r in records if r.checked not in ("", "equal") or r.lowered is False]
    print(
        json.dumps(
            {
                "device": device.device_kind,
                "jax": jax.__version__,
                "records": [asdict(r) for r in records],
            }
        )
    )
    return 1 if bad else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=(__doc__ or "").split("\n")[0],
    )
    p.add_argument("--small", action="store_true", help="tiny sizes, to try it")
    p.add_argument(
        "--lower",
        nargs="*",
        choices=["tpu", "cuda"],
        default=["tpu", "cuda"],
        help="on a CPU: what to lower for; Mosaic GPU takes 15 s of CPU a kernel",
    )
    return p


if __name__ == "__main__":
    raise SystemExit(main())
