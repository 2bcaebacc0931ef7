"""What is evaluated: whose drafter, at which widths, on which sets of prompts."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dcut_jax.config import ConfigError
from dcut_jax.engine.load import Pair
from dcut_jax.engine.policy import WIDTHS
from dcut_jax.prompts import Prompt, PromptError, load_prompts
from dcut_jax.train.checkpoints import DIRECTORY
from dcut_jax.train.config import CONFIG
from dcut_jax.train.export import MANIFEST, export, stored_config
from dcut_jax.weights.dflash import WEIGHTS, drafter_config
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.json_io import read_json
from dcut_jax.weights.load import SMOLLM2


@dataclass(frozen=True)
class Candidate:
    """A drafter to evaluate, in the published layout.

    Attributes:
      name: for people.
      step: of the run that it was taken from; None for an exported one.
    """

    directory: Path
    name: str
    step: int | None


def is_run(path: Path) -> bool:
    """Whether a directory is a training run's, not an exported drafter's.

    Raises:
      CheckpointError: it is neither.
    """
    if (path / CONFIG).is_file():
        if (path / DIRECTORY).is_dir():
            return True
        if (path / WEIGHTS).is_file():
            return False
    found = "nothing"
    if path.is_dir():
        found = (
            ", ".join(sorted(p.name for p in path.iterdir())[:20]) or "nothing in it"
        )
    raise CheckpointError(
        f"{path}: expected a training run ({CONFIG}, {DIRECTORY}) or an exported "
        f"drafter ({CONFIG}, {WEIGHTS}), found {found}; check the path"
    )


def most_drafts(path: Path) -> int:
    """Drafts of a full block, from the description of a run or drafter alone.

    Raises:
      CheckpointError, ConfigError: it is neither, or its description is broken.
    """
    if is_run(path):
        return stored_config(path)[1].max_drafts
    described = drafter_config(read_json(path / CONFIG), str(path / CONFIG))
    return described.max_drafts


def choose_widths(wanted: Sequence[int] | None, most: int) -> tuple[int, ...]:
    """The widths to evaluate, rising; None: 3, 7 and 15 as far as the block goes.

    Raises:
      ConfigError: one is beyond the `most` drafts of the drafter's block.
    """
    if wanted is None:
        return tuple(sorted({min(w, most) for w in WIDTHS}))
    beyond = [w for w in wanted if not 1 <= w <= most]
    if beyond:
        raise ConfigError(
            f"--widths: expected 1 to {most} drafts, which is what this drafter's "
            f"block holds, found {', '.join(map(str, beyond))}"
        )
    return tuple(sorted(set(wanted)))


def read_sets(sources: Sequence[str], limit: int | None) -> dict[str, list[Prompt]]:
    """Prompts by the name of their set: a shipped one's, or a file's without `.jsonl`.

    Raises:
      PromptError: a file is missing or broken, naming file and line, or two sets
        have one name.
    """
    sets: dict[str, list[Prompt]] = {}
    for source in sources:
        prompts, name = load_prompts(source, limit), Path(source).stem
        if name in sets:
            raise PromptError(
                f"--data: expected sets with names of their own, found {name!r} twice; "
                f"rename one of the files"
            )
        sets[name] = prompts
    return sets


@contextmanager
def opened(path: Path, target: str | None) -> Iterator[tuple[Candidate, str]]:
    """A drafter ready to load, and where its target lies.

    A run's is what `export` would write of it now, for as long as the context lasts.

    Args:
      target: as named; None: the run's own, or SmolLM2 for an exported drafter.

    Raises:
      CheckpointError, ConfigError: there is no such run, drafter or target.
    """
    name = path.resolve().name
    if not is_run(path):
        yield Candidate(path, name, None), target or SMOLLM2
        return
    with tempfile.TemporaryDirectory() as made:
        step = export(path, made, target)
        yield (
            Candidate(Path(made), name, step),
            target or stored_config(path)[1].target,
        )


def check_made_for(candidate: Candidate, pair: Pair) -> None:
    """Refuses a drafter whose manifest names another target, though shapes agree.

    Raises:
      ConfigError: with both identities.
    """
    path = candidate.directory / MANIFEST
    if not path.is_file():
        return
    try:
        theirs = json.loads(path.read_text())["target"]
        identity, called = theirs["identity"], theirs["name"]
    except (ValueError, KeyError, TypeError):
        return  # a manifest of someone else's
    if identity != pair.target.identity:
        raise ConfigError(
            f"drafter {candidate.name}: expected target {called} ({identity}), which "
            f"it was trained for, found {pair.target.name} ({pair.target.identity}); "
            f"name its own with --target"
        )
