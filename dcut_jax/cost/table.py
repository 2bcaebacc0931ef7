"""The cost table: measured step times, their fingerprint, and how they are read.

Imports nothing but NumPy, so that another engine can read a table without JAX.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dcut_jax.files import write_text

VERSION = 3
HOW_TO_MEASURE = "measure one with `python -m dcut_jax.profile`"


class CostError(ValueError):
    """A cost that is missing, not usable, or measured somewhere else."""


@dataclass(frozen=True)
class Fingerprint:
    """Where and on what a table was measured. Any difference refuses the table.

    Attributes:
      device_kind, device_count: as JAX names them; `host` is the CPU model on a CPU.
      mesh: axis names and sizes; `strategy` is how the models are laid out on it.
      target, drafter: identities of the checkpoints (`drafter` is "" without one).
      dtype, draft_dtype, cache_dtype: of weights and caches.
      positions: cached positions of a slot.
      sampling: whether requests may draw their tokens.
      logprobs: what is told of a token, as in `decode.steps.StepShapes`.
      backends: the forms of the kernels, by operation.
      jax: version.
      code: digest of the source that the measured steps are compiled from.
    """

    device_kind: str
    device_count: int
    host: str
    mesh: tuple[tuple[str, int], ...]
    strategy: str
    target: str
    drafter: str
    dtype: str
    draft_dtype: str
    cache_dtype: str
    positions: int
    sampling: bool
    logprobs: int
    backends: str
    jax: str
    code: str

    def differences(self, other: "Fingerprint") -> list[str]:
        """`field: self, other` of every field that differs."""
        pairs = [
            (f.name, getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
        ]
        return [f"{name}: {a!r}, here {b!r}" for name, a, b in pairs if a != b]


# The kinds of cells, and how many numbers name one.
KEY_PARTS = {"draft": 3, "verify": 4, "plan": 1, "catch_up": 2, "share": 5}
# Measured; or computed from peak rates, as they are or fitted to a table of the same
# fingerprint that lacks this batch size (`cost.select`).
Source = Literal["measured", "roofline", "fitted roofline"]
Samples = Mapping[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class CostTable:
    """Raw samples in ms; medians are derived when a cost is asked for.

    Attributes:
      draft: by (slots, width, context).
      verify: by (slots, rows, widest request, context): the target's pass, acceptance
        and the commit of caches.
      plan: by (slots,): planning, packing and the read-back that AR does without.
      catch_up: by (slots, steps): projecting the drafter's context of so many plain
        steps.
      source: how the times came about. What is computed takes a table's place where
        nothing was measured, and says so.
      experts: by the keys of `verify`, not times but distinct experts of a layer that
        the rows of a data shard touched, mean over layers with experts and over
        shards; empty where that is unknown.
      share: by (slots, rows, widest request, chunk, context): as `verify`, with so many
        rows of a prompt in the same pass; empty where no step takes any along.
    """

    fingerprint: Fingerprint
    draft: Samples
    verify: Samples
    plan: Samples
    catch_up: Samples
    source: Source = "measured"
    experts: Samples = field(default_factory=dict)
    share: Samples = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise CostError(
                f"source {self.source!r} of a cost table is unknown; expected one of "
                f"{get_args(Source)}"
            )
        for key, counts in self.experts.items():
            if key not in self.verify or not all(0 < n < np.inf for n in counts):
                raise CostError(
                    f"distinct experts of {key}: expected counts above 0 for a step "
                    f"that has a verify time, found {counts}; {HOW_TO_MEASURE}"
                )
        for name, parts in KEY_PARTS.items():
            for key, samples in getattr(self, name).items():
                if len(key) != parts or not all(isinstance(k, int) for k in key):
                    raise CostError(
                        f"{name} time of {key}: expected a key of {parts} whole "
                        f"numbers; {HOW_TO_MEASURE}"
                    )
                if not samples or not all(np.isfinite(s) and s > 0 for s in samples):
                    raise CostError(
                        f"{name} time of {key}: expected finite samples above 0 ms, "
                        f"found {samples}; {HOW_TO_MEASURE}"
                    )

    @classmethod
    def empty(cls) -> "CostTable":
        """A table without cells, of nowhere; every look-up raises."""
        nowhere = Fingerprint(
            "", 0, "", (), "", "", "", "", "", "", 0, False, 0, "", "", ""
        )
        return cls(nowhere, {}, {}, {}, {})

    def require(self, here: Fingerprint) -> "CostTable":
        """Returns the table; raises CostError where it was not measured here."""
        differences = self.fingerprint.differences(here)
        if differences:
            raise CostError(
                "this cost table was measured elsewhere (table, here): "
                + "; ".join(differences)
                + f"; {HOW_TO_MEASURE}"
            )
        return self

    @cached_property
    def _medians(self) -> dict[str, dict[tuple[int, ...], dict[int, float]]]:
        """Medians by name, by key without its context, and by context."""
        found: dict[str, dict[tuple[int, ...], dict[int, float]]] = {}
        for name in ("draft", "verify", "share"):
            by_key = found.setdefault(name, {})
            for (*key, context), samples in sorted(getattr(self, name).items()):
                median = float(np.median(samples))
                by_key.setdefault(tuple(key), {})[context] = median
        return found

    def _at(self, name: str, key: tuple[int, ...], context: float) -> float:
        """Median at `key`, linear between profiled contexts, constant outside."""
        found = self._medians[name].get(key)
        if found is None:
            known = sorted(self._medians[name])
            raise CostError(
                f"no {name} time for {key}; known: {known}; {HOW_TO_MEASURE}"
            )
        return float(np.interp(context, list(found), list(found.values())))

    def draft_ms(self, slots: int, width: int, context: float) -> float:
        """Time of drafting `width` tokens for every slot."""
        return self._at("draft", (slots, width), context)

    def verify_ms(self, slots: int, rows: int, width: int, context: float) -> float:
        """Time of verifying `rows` rows, at most `width` of one request."""
        return self._at("verify", (slots, rows, width), context)

    def share_ms(
        self, slots: int, rows: int, width: int, chunk: int, context: float
    ) -> float:
        """The same with `chunk` rows of a prompt in the same pass."""
        return self._at("share", (slots, rows, width, chunk), context)

    def plan_ms(self, slots: int) -> float:
        """Time of planning and of everything else that AR decoding does not do."""
        samples = self.plan.get((slots,))
        if samples is None:
            raise CostError(f"no plan time for {slots} slots; {HOW_TO_MEASURE}")
        return float(np.median(samples))

    def catch_up_ms(self, slots: int, steps: int) -> float:
        """Time of projecting the drafter's context of `steps` plain steps."""
        samples = self.catch_up.get((slots, steps))
        if samples is None:
            raise CostError(
                f"no catch-up time for {steps} steps of {slots} slots; {HOW_TO_MEASURE}"
            )
        return float(np.median(samples))

    def merged(self, other: "CostTable") -> "CostTable":
        """Both tables' cells; `other` wins where both have one.

        Raises:
          CostError: they are of different places, or one is measured and one is not.
        """
        other.require(self.fingerprint)
        if other.source != self.source:
            raise CostError(
                f"one table is {self.source}, the other {other.source}; expected both "
                f"to be of one kind. {HOW_TO_MEASURE} and use that alone"
            )
        return CostTable(
            self.fingerprint,
            {**self.draft, **other.draft},
            {**self.verify, **other.verify},
            {**self.plan, **other.plan},
            {**self.catch_up, **other.catch_up},
            self.source,
            {**self.experts, **other.experts},
            {**self.share, **other.share},
        )

    def save(self, path: Path) -> None:
        """Writes JSON; a reader never sees half a file."""
        data = {
            "version": VERSION,
            "fingerprint": asdict(self.fingerprint),
            "source": self.source,
            **{
                name: [
                    [list(k), list(v)] for k, v in sorted(getattr(self, name).items())
                ]
                for name in (*KEY_PARTS, "experts")
            },
        }
        write_text(path, json.dumps(data))

    @classmethod
    def load(cls, path: Path) -> "CostTable":
        """Reads what `save` wrote.

        Raises:
          CostError: naming the file, if it is not such a table.
        """
        return cls.parse(path.read_text(errors="replace"), path)

    @classmethod
    def parse(cls, text: str, path: Path) -> "CostTable":
        """The table of a file's text; `path` is for messages. Raises as `load` does."""
        try:
            # Tables whose steps take no prompts along, and older ones, have no `share`.
            data: dict[str, Any] = {"share": (), **json.loads(text)}
            if data["version"] != VERSION:
                raise CostError(
                    f"{path}: table version {data['version']}, expected {VERSION}; "
                    f"{HOW_TO_MEASURE}"
                )
            print_ = dict(data["fingerprint"])
            print_["mesh"] = tuple((str(a), int(n)) for a, n in print_["mesh"])
            tables = {
                name: {tuple(k): tuple(v) for k, v in data[name]} for name in KEY_PARTS
            }
            # Tables of dense models, and older ones, have neither of these two.
            seen = {tuple(k): tuple(v) for k, v in data.get("experts", ())}
            source = data.get("source", "measured")
            return cls(Fingerprint(**print_), **tables, source=source, experts=seen)
        except CostError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise CostError(
                f"{path} is not a cost table ({e}); {HOW_TO_MEASURE}"
            ) from e
