"""`python -m dcut_jax.bench.day`: all that is to be asked of a GPU, in nine minutes.

Kernels in their tests and their bench; steps of a Qwen3-8B and a Qwen3-30B-A3B of
random weights against the roofline; D-Cut against plain decoding on synthetic
acceptance. Each stage is a process with a time limit: one that fails or hangs is
recorded with its error and the others go on. What there is by the end is in one JSON,
`day.json`, with pictures beside it. The status says whether every stage came out well.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dcut_jax.bench.records import host
from dcut_jax.bench.report import require_matplotlib
from dcut_jax.cli import run
from dcut_jax.files import write_text

VERSION = 1
MODULE = "dcut_jax.bench.day"
ROOT = Path(__file__).resolve().parents[2]
SURVIVAL = "configs/synthetic/dflash-published.json"
RESERVE_S = 5.0  # kept for writing down what there is
WORTH_S = 10.0  # a stage is not begun with less
SHOWN = 4000  # characters of what a failed stage printed

Status = Literal["ok", "failed", "out of time", "not begun"]


@dataclass(frozen=True)
class Stage:
    """One process of the day.

    Attributes:
      command: its arguments; the first is a module of this Python.
      limit_s: it is ended after so long.
      result: the file that it writes, a JSON object; None: the last line that it
        prints is one.
      needed: whether the day ends where it fails.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: Path | None = None
    needed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a stage.

    Attributes:
      error: the end of what it printed, where it did not come out well.
      result: what it found, also of one that was ended early; None: nothing.
    """

    name: str
    command: str
    status: Status
    seconds: float
    error: str = ""
    result: Any = None


@dataclass(frozen=True)
class Sizes:
    """How large the day is: as it is on a GPU, or tiny, to try it anywhere.

    Attributes:
      slower: how much longer stages may take than on a GPU: processors are shared.
    """

    targets: tuple[Path, ...]
    platform: str
    dtype: str
    step_flags: tuple[str, ...]
    bench_flags: tuple[str, ...]
    bench_batches: tuple[int, ...]
    kernel_flags: tuple[str, ...] = ()
    test_flags: tuple[str, ...] = ()
    slower: float = 1.0


def full() -> Sizes:
    """What fits nine minutes of an H200."""
    return Sizes(
        targets=tuple(
            ROOT / "configs" / "targets" / f"{name}.toml"
            for name in ("qwen3-8b", "qwen3-30b-a3b")
        ),
        platform="gpu",
        dtype="bfloat16",
        step_flags=(),
        bench_flags=(
            "--prompts=random:128",
            "--limit=32",
            "--max-new-tokens=96",
            "--rounds=3",
            "--tokens-per-request=32",
            "--arms=ar,fixed-7,dcut",
        ),
        bench_batches=(32, 8, 128),
    )


# A mixture of experts that compiles in seconds on two cores.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def tiny(out: Path) -> Sizes:
    """The same stages with next to nothing in them; the target is written to `out`."""
    target = out / "tiny-mixture.json"
    write_text(target, json.dumps(TINY))
    return Sizes(
        targets=(target,),
        platform="cpu",
        dtype="float32",
        step_flags=(
            "--batch-sizes=1",
            "--factors=1,16",
            "--max-length=128",
            "--rounds=2",
        ),
        bench_flags=(
            "--prompts=random:4",
            "--limit=2",
            "--max-new-tokens=8",
            "--rounds=1",
            "--tokens-per-request=4",
            "--arms=ar,fixed-7",
        ),
        bench_batches=(2,),
        kernel_flags=("--small", "--lower"),
        test_flags=("--collect-only",),
        slower=10.0,
    )


def stages(sizes: Sizes, out: Path) -> list[Stage]:
    """The day's plan, what matters most first."""
    survival = f"synthetic:{ROOT / SURVIVAL}"
    tests = str(ROOT / "tests" / "kernels")
    # What a newer JAX warns of is not what is asked here.
    quiet = "-q", "-p", "no:cacheprovider", "-W", "default"
    pytest = ("pytest", "-m", "gpu", *quiet, *sizes.test_flags)
    found = [
        Stage("device", (MODULE, f"--device={sizes.platform}"), 60, needed=True),
        Stage("kernel tests", (*pytest, tests), 90, result=Path(os.devnull)),
        Stage("kernels", ("pallas_kernels.bench", *sizes.kernel_flags), 60),
    ]
    for target in sizes.targets:
        record = out / f"steps-{target.stem}.json"
        models = f"--target=random:{target}", f"--drafter={survival}"
        flags = f"--dtype={sizes.dtype}", f"--out={record}", *sizes.step_flags
        command = ("dcut_jax.bench.step_times", *models, *flags)
        found.append(Stage(f"steps of {target.stem}", command, 120, record))
    dtypes = [f"--{of}={sizes.dtype}" for of in ("dtype", "draft-dtype", "cache-dtype")]
    for batch in sizes.bench_batches:
        for target in sizes.targets:
            where = out / f"dcut-{target.stem}-{batch}"
            command = (
                "dcut_jax.bench",
                f"--target=random:{target}",
                f"--drafter={survival}",
                f"--batch-sizes={batch}",
                f"--out={where}",
                f"--cost-dir={out / 'costs'}",
                *dtypes,
                *sizes.bench_flags,
            )
            name = f"D-Cut and AR of {target.stem}, batch {batch}"
            found.append(Stage(name, command, 110, where / "bench.json"))
    return [replace(stage, limit_s=sizes.slower * stage.limit_s) for stage in found]


def run_stage(stage: Stage, limit_s: float, environment: Mapping[str, str]) -> Outcome:
    """Runs a stage to its end, or to its limit; nothing that it starts is left."""
    command = (sys.executable, "-m", *stage.command)
    said = shlex.join(("python", "-m", *stage.command))
    start = time.monotonic()
    if stage.result is not None and stage.result.is_file():
        stage.result.unlink()  # of an earlier day
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    late = False
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
    finally:
        if process.returncode is None:  # we are told to end; it has no other parent
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    status: Status = "ok" if process.returncode == 0 else "failed"
    error = "" if status == "ok" else printed[-SHOWN:]
    if late:
        status = "out of time"
        error = f"ended after {seconds:.0f} s; {error}"
    try:
        result = read_result(stage, printed)
    except ValueError as wrong:
        result = None
        if status == "ok":
            status, error = "failed", f"{wrong}: {printed[-SHOWN:]}"
    return Outcome(stage.name, said, status, seconds, error, result)


def read_result(stage: Stage, printed: str) -> Any:
    """What a stage found.

    Raises:
      ValueError: nothing that can be read.
    """
    if stage.result == Path(os.devnull):
        return printed.strip().splitlines()[-1:]  # for people
    if stage.result is None:
        lines = printed.strip().splitlines()
        return json.loads(lines[-1] if lines else "")
    try:
        return json.loads(stage.result.read_text())
    except OSError as error:
        raise ValueError(f"expected {stage.result}, found {error}") from error


@dataclass
class Day:
    """The stages one after another, within a time.

    Attributes:
      outcomes: of the stages so far.
      machine: as `records.host` tells.
    """

    out: Path
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    machine: Mapping[str, object] = field(default_factory=host)  # as it begins

    def run(self, plan: Sequence[Stage], say: Callable[[str], None] = print) -> bool:
        """Runs what there is time for; whether all of it came out well."""
        end = time.monotonic() + self.seconds - RESERVE_S
        ended = ""
        for stage in plan:
            left = end - time.monotonic()
            if not ended and left < WORTH_S:
                ended = f"{left:.0f} s were left"
            if ended:
                said = shlex.join(("python", "-m", *stage.command))
                done = Outcome(stage.name, said, "not begun", 0.0, ended)
            else:
                say(f"{stage.name}: at most {min(left, stage.limit_s):.0f} s")
                done = run_stage(stage, min(left, stage.limit_s), self.environment)
            if stage.needed and done.status != "ok":
                ended = f"{stage.name} came out badly"
            self.outcomes.append(done)
            say(f"{done.name}: {done.status}, {done.seconds:.0f} s")
            if done.error and done.status != "not begun":
                say(done.error)
            self.save()  # after each, for the machine may go
        return all(done.status == "ok" for done in self.outcomes)

    def save(self) -> None:
        """Writes all outcomes into one file."""
        data = {
            "version": VERSION,
            "label": "random weights and synthetic acceptance; times are real",
            "machine": self.machine,  # the host's; stages name the device
            "stages": [asdict(done) for done in self.outcomes],
        }
        write_text(self.out / "day.json", json.dumps(data, indent=1) + "\n")


def tell_device(platform: str) -> int:
    """Prints the device of this process; 1 if it is not of `platform`."""
    import jax

    found = jax.devices()[0]
    if found.platform != platform:
        print(
            f"expected a device of platform {platform!r}, found {found}; install JAX "
            f"for it (scripts/gpu_day.sh does), or try the day with --tiny"
        )
        return 1
    kind = {"platform": found.platform, "kind": found.device_kind}
    print(json.dumps({**kind, "count": len(jax.devices()), "jax": jax.__version__}))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m dcut_jax.bench.day",
        description=(__doc__ or "").split("\n")[0],
    )
    p.add_argument("--out", type=Path, default=Path("gpu-day"))
    p.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    p.add_argument(
        "--tiny", action="store_true", help="next to nothing, on a CPU, to try it"
    )
    p.add_argument(
        "--device", metavar="PLATFORM", help="only tell the device; fail on another"
    )
    return p


def environment_of(sizes: Sizes, scratch: Path) -> dict[str, str]:
    """What stages are started with."""
    return {
        "JAX_PLATFORMS": "cpu" if sizes.platform == "cpu" else "cuda,cpu",
        # Stages share what they compile.
        "JAX_COMPILATION_CACHE_DIR": str(scratch),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "PYTHONUNBUFFERED": "1",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the day; 1 unless every stage came out well."""
    args = parser().parse_args(argv)
    if args.device:
        return tell_device(args.device)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    require_matplotlib()  # of the stages that draw, before the first of all
    sizes = tiny(out) if args.tiny else full()
    day = Day(out, 60 * args.minutes, environment_of(sizes, out / "compiled"))
    # As when interrupted: the stage that runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    well = day.run(stages(sizes, out))
    print(summary(day.outcomes))
    print(f"wrote {out / 'day.json'}")
    return 0 if well else 1


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each stage."""
    return "\n".join(_lines(outcomes))


def _lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for done in outcomes:
        yield f"{done.status:12}{done.seconds:6.0f} s  {done.name}"


if __name__ == "__main__":
    run(main)
