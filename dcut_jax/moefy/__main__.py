"""Makes a mixture of experts of a dense target's own neurons.

    python -m dcut_jax.moefy make   --data RESPONSES.jsonl.gz --out DIRECTORY
    python -m dcut_jax.moefy export DIRECTORY OUT

`make` cuts the feed-forward layers into a shared expert and routed ones, fits routers,
and then routers and norms to the dense target's own distribution. Its directory is
small, since experts are neurons of the dense target in another order. The same data and
settings give the same directory on the same kind of machine. `export` writes a whole
checkpoint in Hugging Face's layout.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dcut_jax.cli import DTYPES, positive, run
from dcut_jax.config import ConfigError, ExpertsConfig, ModelConfig
from dcut_jax.files import write_text
from dcut_jax.models.params import cast
from dcut_jax.moefy import distil
from dcut_jax.moefy.cluster import Batch, make_split
from dcut_jax.prompts import load_prompts
from dcut_jax.train.collect import read_responses
from dcut_jax.weights.hf import save_hf
from dcut_jax.weights.load import SMOLLM2, Target, load_target
from dcut_jax.weights.split import cut, even_experts, load_split, save_split

Documents = list[list[int]]
HELD_OUT = 0.05  # of the documents, by a hash of their prompt
MEASURED_DOCS = 16


@dataclass(frozen=True)
class Recipe:
    """What a split depends on, besides its data.

    Attributes:
      cluster_batches: batches of documents that neurons are clustered on.
      fit_batches: batches that routers are first fitted on.
      dtype: of the frozen weights while routers and norms are fitted.
    """

    experts: int = 16
    active: int = 8
    shared: int = 512
    steps: int = 0
    docs: int = 4
    length: int = 128
    cluster_batches: int = 3
    fit_batches: int = 16
    seed: int = 0
    dtype: str = "float32"


def read_documents(path: Path, target: Target) -> tuple[Documents, Documents]:
    """Prompts with their responses, token ids, one after the other: two parts of them.

    Returns:
      Those to fit to, and those that are held out.

    Raises:
      DatasetError: see `train.collect.read_responses`.
    """
    parts: tuple[Documents, Documents] = [], []
    for r in read_responses(path, target):
        parts[is_held_out(r["prompt"])].append([*r["prompt"], *r["response"]])
    return parts


def is_held_out(prompt: Sequence[int]) -> bool:
    """By a hash of the prompt, so that it stays so however the data grow."""
    tokens = np.asarray(prompt, np.int32).tobytes()
    return int.from_bytes(hashlib.sha256(tokens).digest()[:4]) < HELD_OUT * 2**32


def make_batch(documents: Sequence[Sequence[int]], length: int) -> Batch:
    """Documents cut or padded to `length`."""
    token_NS = np.zeros((len(documents), length), np.int32)
    valid_NS = np.zeros((len(documents), length), bool)
    for row, valid, document in zip(token_NS, valid_NS, documents, strict=True):
        some = document[:length]
        row[: len(some)], valid[: len(some)] = some, True
    return token_NS, valid_NS


def endless(documents: list[list[int]], recipe: Recipe) -> Iterator[Batch]:
    """Batches in an order drawn anew for each round through the documents."""
    if len(documents) < recipe.docs:
        raise ValueError(
            f"expected at least {recipe.docs} documents for a batch, found "
            f"{len(documents)}; give more responses, or take fewer at a time"
        )
    rng = np.random.default_rng(recipe.seed)
    while True:
        order = rng.permutation(len(documents))
        for at in range(0, len(order) - recipe.docs + 1, recipe.docs):
            some = [documents[i] for i in order[at : at + recipe.docs]]
            yield make_batch(some, recipe.length)


def measure(
    ordered: Any,
    tree: Any,
    cfg: ModelConfig,
    experts: ExpertsConfig,
    batches: Sequence[Batch],
) -> dict[str, float]:
    """Perplexities of both, agreement of arg-max, divergence in nats."""
    sums: dict[str, float] = {}
    for batch in batches:
        found = distil.compare(ordered, tree, *batch, cfg=cfg, experts=experts)
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    rows = sums["rows"]
    return {
        "tokens": rows,
        "dense_perplexity": float(np.exp(sums["dense_loss"] / rows)),
        "perplexity": float(np.exp(sums["loss"] / rows)),
        "agreement": sums["agree"] / rows,
        "divergence": sums["divergence"] / rows,
    }


def say(**record: Any) -> None:
    """One line of progress, JSON."""
    print(json.dumps(record), flush=True)


def fit(
    frozen: Any,
    tree: Any,
    cfg: ModelConfig,
    experts: ExpertsConfig,
    order: Iterator[Batch],
    recipe: Recipe,
) -> Any:
    """Fits routers and norms, and says how it goes."""
    start = time.perf_counter()
    opt_state = distil.make_optimizer(recipe.steps).init(tree)
    for number in range(recipe.steps):
        tree, opt_state, loss = distil.step(
            *(frozen, tree, opt_state, *next(order)),
            cfg=cfg,
            experts=experts,
            steps=recipe.steps,
        )
        if number % 10 == 9 or number < 2:
            seconds = round(time.perf_counter() - start)
            say(step=number + 1, loss=round(float(loss), 4), seconds=seconds)
    return tree


def make(
    source: str, data: Path, out: Path, recipe: Recipe, begun: Path | None = None
) -> None:
    """Makes a split and writes it; progress and measures go to standard output.

    `begun` is one made before, whose routers and norms are fitted further.
    """
    target = load_target(source, jnp.float32)
    cfg, params = target.cfg, target.params
    experts = even_experts(cfg, recipe.experts, recipe.active, recipe.shared)
    train, held_out = read_documents(data, target)
    tests = {"held out": held_out[:MEASURED_DOCS]}
    if target.tokenizer is not None:
        for name in ("gsm8k", "humaneval"):
            chats = [list(p.messages) for p in load_prompts(name, 8)]
            tests[name] = [target.tokenizer.chat(c) for c in chats]
    measured = {
        name: [
            make_batch(some[i : i + recipe.docs], recipe.length)
            for i in range(0, len(some), recipe.docs)
        ]
        for name, some in tests.items()
        if some  # of few documents none may be held out
    }
    if not measured:
        raise ConfigError(
            f"{data}: expected documents to measure the split on, found none held out "
            f"of {len(train)}; give more responses"
        )
    start = time.perf_counter()
    order = endless(train, recipe)
    if begun is None:
        firsts = [next(order) for _ in range(recipe.fit_batches)]
        split = make_split(params, cfg, experts, firsts, recipe.cluster_batches)
    else:
        found, split = load_split(begun, cfg, target.identity)
        if found != experts:
            raise ConfigError(f"{begun} has {found}; the flags say {experts}")
    say(stage="begun", seconds=round(time.perf_counter() - start))

    ordered = distil.ordered(params, split)
    tree = distil.trained(split)

    def report() -> dict[str, Any]:
        return {n: measure(ordered, tree, cfg, experts, b) for n, b in measured.items()}

    before = report()
    say(stage="before", **before)
    if recipe.steps:
        tree = fit(
            cast(ordered, jnp.dtype(recipe.dtype)), tree, cfg, experts, order, recipe
        )
    after = report() if recipe.steps else before
    say(stage="after", **after)
    split = distil.with_trained(split, tree)
    cut_cfg, _ = cut(cfg, params, experts, split)
    about = {
        "base": target.name,
        "base_identity": target.identity,
        "recipe": asdict(recipe) | {"begun": begun is not None},
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "before": before,
        "after": after,
    }
    save_split(out, cut_cfg, split, about)


def export(source: str, directory: Path, out: Path) -> None:
    """Writes the whole checkpoint, with its tokenizer, in float32."""
    target = load_target(source, jnp.float32)
    if target.tokenizer is not None and target.tokenizer.prefix:
        raise ConfigError(
            f"{target.name}: expected a tokenizer without tokens in front of every "
            f"text, found {target.tokenizer.prefix}, which this export cannot write; "
            f"export from the target's Hugging Face directory"
        )
    experts, split = load_split(directory, target.cfg, target.identity)
    save_hf(out, *cut(target.cfg, target.params, experts, split))
    if target.tokenizer is not None:
        write_tokenizer(out, target)


def write_tokenizer(out: Path, target: Target) -> None:
    """The tokenizer of a target, as `load_target` reads it from a directory."""
    text = target.text()
    text.backend.save(str(out / "tokenizer.json"))
    config = {**text.special, "chat_template": text.template}
    write_text(out / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    ends = {"eos_token_id": list(text.eos_ids)}
    write_text(out / "generation_config.json", json.dumps(ends, indent=1) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's values."""
    p = argparse.ArgumentParser(
        prog="python -m dcut_jax.moefy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True)
    new = commands.add_parser("make", help="cut a dense target into experts")
    new.add_argument("--data", type=Path, required=True, help="token ids, JSON Lines")
    new.add_argument("--out", type=Path, required=True)
    new.add_argument("--begun", type=Path, help="a split to fit further")
    for name, value in asdict(Recipe()).items():
        kind = {"seed": int, "steps": int, "shared": int, "dtype": str}.get(
            name, positive
        )
        flag = name.replace("_", "-")
        some = DTYPES if name == "dtype" else None
        new.add_argument(
            f"--{flag}", type=kind, choices=some, default=value, help=f"default {value}"
        )
    whole = commands.add_parser("export", help="write a whole checkpoint of a split")
    whole.add_argument("directory", type=Path)
    whole.add_argument("out", type=Path)
    for command in (new, whole):
        command.add_argument("--target", default=SMOLLM2, help="the dense target")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status."""
    args = parse(argv)
    if args.command == "export":
        export(args.target, args.directory, args.out)
        return 0
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    make(args.target, args.data, args.out, recipe, args.begun)
    return 0


if __name__ == "__main__":
    run(main)
