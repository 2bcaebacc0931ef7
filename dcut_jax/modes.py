"""How a command decodes: plainly, with a fixed number of drafts, or by D-Cut."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from dcut_jax.cli import bar, positive
from dcut_jax.cost.table import CostTable
from dcut_jax.cut.fairness import Fairness
from dcut_jax.decode.compile import Compiler
from dcut_jax.engine.config import EngineConfig
from dcut_jax.engine.engine import Engine
from dcut_jax.engine.load import (
    NO_DRAFTER,
    Pair,
    computed_costs,
    has_drafter,
    stored_costs,
)
from dcut_jax.engine.policy import ArPolicy, DCutPolicy, FixedPolicy, Policy
from dcut_jax.engine.profile import default_directory
from dcut_jax.engine.synthetic import SYNTHETIC

Mode = Literal["ar", "fixed", "dcut"]
MODES: tuple[Mode, ...] = ("ar", "fixed", "dcut")
Costs = Literal["measured", "roofline"]
COSTS: tuple[Costs, ...] = ("measured", "roofline")
WIDTH = 7


def add_mode_flags(parser: argparse.ArgumentParser) -> None:
    """The mode, and what belongs to one of them; `settle_mode` checks them."""
    parser.add_argument(
        "--mode", choices=MODES, help="default: dcut, or ar where there is no drafter"
    )
    parser.add_argument(
        "--width",
        type=positive,
        help=f"drafts, with --mode fixed (default: {WIDTH}, or the block's if fewer)",
    )
    parser.add_argument(
        "--cost-dir",
        type=Path,
        help=f"of cost tables, with --mode dcut (default: {default_directory()})",
    )
    parser.add_argument(
        "--costs",
        default=COSTS[0],
        choices=COSTS,
        help="with --mode dcut: measure the costs of steps where none are stored, "
        "which takes a while, or compute them from peak rates (default: measured)",
    )
    parser.add_argument(
        "--fairness",
        choices=get_args(Fairness),
        help="with --mode dcut: a token is worth the same to every request (equal), or "
        "the more the fewer it got of late (proportional); priorities count in both "
        "(default: equal)",
    )
    parser.add_argument(
        "--patience",
        type=positive,
        help="with --mode dcut: drafting steps after which a draft of a request is "
        f"verified whatever it is worth (default: {DCutPolicy.patience})",
    )


def settle_mode(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in the mode and the drafter; refuses what does not go with them."""
    drafts = has_drafter(args.target, args.drafter)
    if args.mode is None:
        args.mode = "dcut" if drafts else "ar"
        if not drafts and args.drafter is None:
            print(
                f"no drafter is shipped for target {args.target!r}: taking --mode ar; "
                f"--drafter names one",
                file=sys.stderr,
            )
    elif args.mode != "ar" and not drafts:
        parser.error(f"--mode {args.mode} needs a drafter; name one with --drafter")
    # A command differs from others in its mode alone. Synthetic drafts come with a
    # target of their own, which all modes decode.
    if args.mode == "ar" and not (args.drafter or "").startswith(SYNTHETIC):
        args.drafter = NO_DRAFTER
    if args.width and args.mode != "fixed":
        parser.error(f"--width belongs to --mode fixed; the mode is {args.mode}")
    if args.cost_dir and args.mode != "dcut":
        parser.error(f"--cost-dir belongs to --mode dcut; the mode is {args.mode}")
    for flag in ("fairness", "patience"):
        if getattr(args, flag) is not None and args.mode != "dcut":
            parser.error(f"--{flag} belongs to --mode dcut; the mode is {args.mode}")
    if args.costs != COSTS[0] and args.mode != "dcut":
        parser.error(f"--costs belongs to --mode dcut; the mode is {args.mode}")
    if args.processes and args.costs == "roofline":
        parser.error(
            "--costs roofline: each process would measure rates of its own; expected "
            "measured costs where several take part"
        )


def build_engine(
    pair: Pair,
    config: EngineConfig,
    mode: Mode,
    width: int | None,
    tokens: Callable[[], Sequence[int]],
    *,
    costs: Costs = "measured",
    cost_dir: Path | None = None,
    fairness: Fairness | None = None,
    patience: int | None = None,
    progress: bool = False,
) -> Engine:
    """An engine that decodes in a mode; measures costs where the mode needs them.

    Args:
      width: drafts, in mode "fixed"; None: 7, or as many as a block has.
      tokens: gives real ones, to fill the caches with where costs are measured.
      costs: "roofline" starts at once: where this machine's costs were not measured,
        they are computed from its peak rates, and corrected while decoding.
      cost_dir: of cost tables; None takes `engine.profile.default_directory()`.
      fairness, patience: of mode "dcut", see `DCutPolicy`, whose own stand for None.
      progress: whether a bar shows on standard error while costs are measured.

    Raises:
      ValueError: a mode that is unknown or that this pair cannot decode in, or what
        belongs to another mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; choose from {', '.join(MODES)}")
    most = pair.models.drafter.max_drafts if pair.models.drafter else 0
    if mode != "ar" and not most:
        raise ValueError(f"mode {mode!r} needs a drafter; name one, or take mode 'ar'")
    width = min(WIDTH, most) if width is None else width
    if mode == "fixed" and not 1 <= width <= most:
        raise ValueError(
            f"expected a width of 1 to {most} drafts, which is what this drafter's "
            f"block holds; found {width}"
        )
    both = {"fairness": fairness, "patience": patience}
    wishes: dict[str, Any] = {k: v for k, v in both.items() if v is not None}
    if costs not in COSTS:
        raise ValueError(f"costs {costs!r} are unknown; choose from {', '.join(COSTS)}")
    others = {"costs": costs != COSTS[0], "cost_dir": cost_dir is not None}
    theirs = [*wishes, *(name for name, given in others.items() if given)]
    if theirs and mode != "dcut":
        raise ValueError(
            f"{' and '.join(theirs)}: expected mode 'dcut', which plans by them; found "
            f"mode {mode!r}"
        )
    models = pair.models if mode != "ar" else pair.without_drafter()
    compiler = Compiler(models, config.cache_dtype)
    where = cost_dir or default_directory()

    def cut(table: CostTable) -> DCutPolicy:
        return DCutPolicy(table, **wishes)

    def policy() -> Policy:
        match mode:
            case "ar":
                return ArPolicy()
            case "fixed":
                return FixedPolicy(width)
            case "dcut" if costs == "roofline":
                return cut(computed_costs(pair, config, where))
            case "dcut":
                with bar("step costs", None, shown=progress) as update:
                    table = stored_costs(
                        pair,
                        config,
                        tokens(),
                        compiler,
                        where,
                        on_progress=lambda what, done, _: update(
                            done, f"measuring {what}"
                        ),
                    )
                return cut(table)

    return Engine(models, config, policy(), compiler=compiler)
