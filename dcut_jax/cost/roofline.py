"""What a step must take at least: bytes, operations and messages over peak rates.

A step is a sequence of parts. Of each, the device's share is counted: the operations
of its products, the bytes that it reads and writes in its memory, and the bytes that it
sends. A part takes as long as the slower of products and memory; messages come on
top, for nothing is taken to overlap across parts.

Not in it: starting kernels and collectives, the host, prefill, rows that are routed
unevenly over devices, and products that miss the peak rate. So real steps are slower,
and the fewer rows the more; `Fit` sets two constants against measured times. Operands
of products other than weights are left out, since next to nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from dcut_jax.cost.devices import Device
from dcut_jax.cost.experts import EVEN, distinct_experts
from dcut_jax.cost.mesh import MeshShape, check_divides
from dcut_jax.cost.shapes import DrafterShape, Layers, ModelShape
from dcut_jax.cost.table import CostError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATISTICS_BYTES = 12  # of a row's logits on one shard: largest, its place, sum


@dataclass(frozen=True)
class Part:
    """One device's work in a part of a step.

    Attributes:
      operations: of products, two for a multiply and an add.
      bytes: read from and written to its memory.
      sent: bytes sent to other devices.
      dtype: of the products.
    """

    name: str
    operations: float
    bytes: float
    sent: float = 0.0
    dtype: str = "bfloat16"

    def ms(self, device: Device) -> float:
        products = 0.0
        if self.operations:
            products = self.operations / device.products_per_s(self.dtype)
        sending = self.sent / device.link_per_s if self.sent else 0.0
        return 1e3 * (max(products, self.bytes / device.memory_per_s) + sending)


@dataclass(frozen=True)
class Memory:
    """Bytes that one device holds.

    Attributes:
      weights: of target and drafter.
      cache: keys and values of both.
      logits: of the widest step, in float32: the largest array beside the two.
    """

    weights: float
    cache: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.logits


@dataclass(frozen=True)
class Roofline:
    """Least times of a pair's steps on a mesh of one kind of device.

    Attributes:
      drafter: None without one.
      dtype, draft_dtype, cache_dtype: of both models' weights and of the caches.
      concentration: of routing, see `cost.experts.distinct_experts`.

    Raises:
      ConfigError: the mesh does not divide the models.
      CostError: its devices have no link, or a dtype is unknown.
    """

    device: Device
    mesh: MeshShape
    target: ModelShape
    drafter: DrafterShape | None = None
    dtype: str = "bfloat16"
    draft_dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    concentration: float = EVEN

    def __post_init__(self) -> None:
        check_divides(self.mesh, self.target, self.drafter)
        unknown = {self.dtype, self.draft_dtype, self.cache_dtype} - BYTES.keys()
        if unknown:
            raise CostError(
                f"dtypes {sorted(unknown)} are unknown; known: {', '.join(BYTES)}"
            )
        if self.mesh.devices > 1 and not self.device.link_per_s:
            raise CostError(
                f"{self.device.name} has no link to others, so nothing can be said of "
                f"a mesh of {self.mesh.devices}; measure its costs"
            )

    # -- steps -----------------------------------------------------------------------

    def verify_ms(
        self,
        slots: int,
        rows: int,
        context: float,
        *,
        features: bool = True,
        beside: int = 0,
    ) -> float:
        """Verifying `rows` rows of `slots` requests, over the whole mesh."""
        parts = self.verify(slots, rows, context, features=features, beside=beside)
        return self.ms(parts)

    def draft_ms(self, slots: int, width: int, context: float) -> float:
        """Drafting `width` tokens for every request."""
        return self.ms(self.draft(slots, width, context))

    def plain_ms(self, slots: int, context: float) -> float:
        """A step of autoregressive decoding without a drafter."""
        return self.verify_ms(slots, slots, context, features=False)

    def ms(self, parts: Iterable[Part]) -> float:
        """Time of a step."""
        return sum(part.ms(self.device) for part in parts)

    def verify(
        self,
        slots: int,
        rows: int,
        context: float,
        *,
        features: bool = True,
        beside: int = 0,
    ) -> list[Part]:
        """The target's pass over rows that attend to `context` cached positions.

        Args:
          features: whether the drafter's context of these rows is made as well.
          beside: rows of a prompt that every shard runs as well, of which the last one
            alone gets logits.
        """
        t, mesh = self.target, self.mesh
        judged = ceil(rows / mesh.shards)
        mine = judged + beside
        parts = [
            *self._attention(t, slots, mine, context, self.dtype),
            *self._feed_forward(mine),
            self._between(t, mine, self._active_mlp, self.dtype),
            *self._head(judged + (beside > 0), self.dtype),
            self._reduced(t, mine, self.dtype),
        ]
        if features and self.drafter:
            parts.append(self._context(mine))
        return parts

    def draft(self, slots: int, width: int, context: float) -> list[Part]:
        """The drafter's pass over blocks of `width` drafts and their anchors."""
        d = self._need_drafter()
        requests = ceil(slots / self.mesh.shards)
        mine = requests * (width + 1)
        return [
            *self._attention(d, slots, mine, context + width + 1, self.draft_dtype),
            self._product("mlp", mine, d.layers * d.mlp_params, self.draft_dtype),
            self._between(d, mine, d.mlp, self.draft_dtype),
            *self._head(requests * width, self.draft_dtype),
            self._reduced(d, mine, self.draft_dtype),
        ]

    def catch_up(self, slots: int, steps: int) -> list[Part]:
        """The drafter's context of `steps` plain steps."""
        return [self._context(ceil(slots / self.mesh.shards) * steps)]

    def plan(self, slots: int) -> list[Part]:
        """Sorting the confidences: their bytes, which is nearly nothing."""
        block = self._need_drafter().block
        return [Part("plan", 0.0, 4.0 * slots * block * max(np.log2(slots * block), 1))]

    def distinct_experts(self, rows: int) -> float:
        """Experts of a layer that a step of `rows` rows touches, over the mesh."""
        return distinct_experts(
            self.target.experts, self.target.top_k, rows, self.concentration
        )

    # -- memory ----------------------------------------------------------------------

    def memory(self, slots: int, positions: int, rows: int) -> Memory:
        """Bytes on one device with `slots` requests of up to `positions` positions.

        Args:
          rows: of the widest step.
        """
        t, d, mesh = self.target, self.drafter, self.mesh
        dense = t.layers * t.attention_params + t.moe_layers * t.shared_params
        dense += (t.layers - t.moe_layers) * t.mlp_params
        dense += t.head_params * (1 if t.tied else 2)
        routed = t.moe_layers * t.experts * t.expert_params / mesh.expert
        whole = t.moe_layers * t.router_params + t.norms
        weights = BYTES[self.dtype] * ((dense + routed) / mesh.model + whole)
        cached = t.layers * t.kv_values
        if d:
            tables = 0.0 if self.draft_dtype == self.dtype else 2.0 * t.head_params
            weights += BYTES[self.draft_dtype] * (d.params + tables) / mesh.model
            cached += d.layers * d.kv_values
        requests = ceil(slots / mesh.shards)
        logits = 4.0 * ceil(rows / mesh.shards) * t.vocab / mesh.model
        cache = BYTES[self.cache_dtype] * cached * requests * positions / mesh.model
        return Memory(weights, cache, logits)

    # -- parts -----------------------------------------------------------------------

    def _product(self, name: str, rows: int, params: float, dtype: str) -> Part:
        """Rows through weights that `model` splits."""
        share = params / self.mesh.model
        return Part(name, 2.0 * rows * share, BYTES[dtype] * share, dtype=dtype)

    def _attention(
        self, of: Layers, slots: int, mine: int, context: float, dtype: str
    ) -> list[Part]:
        """Its four products, and the scores and values of cached positions."""
        model, requests = self.mesh.model, ceil(slots / self.mesh.shards)
        seen = of.layers * context / model
        read = BYTES[self.cache_dtype] * of.kv_values * seen * requests
        operations = 4.0 * of.heads * of.head_dim * seen * mine
        projections = of.layers * of.attention_params
        return [
            self._product("projections", mine, projections, dtype),
            Part("attention", operations, read, dtype=dtype),
        ]

    def _feed_forward(self, mine: int) -> list[Part]:
        t, mesh, size = self.target, self.mesh, BYTES[self.dtype]
        dense = (t.layers - t.moe_layers) * t.mlp_params
        dense += t.moe_layers * t.shared_params
        parts = [self._product("mlp", mine, dense, self.dtype)] if dense else []
        if not t.moe_layers:
            return parts
        # The experts of one group of devices see the rows of all of its shards.
        rows = mine * mesh.expert
        share = t.moe_layers * t.expert_params / (mesh.expert * mesh.model)
        router = t.moe_layers * t.router_params
        # A row goes once to each device that has one of its experts, as in
        # `models.experts.capacity`, and in float32.
        asked = (mesh.expert - 1) * (1 - (1 - 1 / mesh.expert) ** t.top_k)
        travel = 2.0 * t.moe_layers * mine * asked * t.embed * BYTES["float32"]
        return [
            *parts,
            Part("router", 2.0 * mine * router, size * router, dtype=self.dtype),
            Part(
                "experts",
                2.0 * rows * t.top_k * share,
                size * self.distinct_experts(rows) * share,
                dtype=self.dtype,
            ),
            # To the experts and back; what stays on the device is not sent.
            Part("all-to-all", 0.0, 0.0, travel),
        ]

    @property
    def _active_mlp(self) -> float:
        """Width of what a row goes through, the mean of all layers."""
        t = self.target
        mixture = t.moe_layers * (t.top_k * t.expert_mlp + t.shared_mlp)
        return ((t.layers - t.moe_layers) * t.mlp + mixture) / t.layers

    def _between(self, of: Layers, mine: int, mlp: float, dtype: str) -> Part:
        """What is read and written between products, layer by layer.

        Two norms, each with a sum of the residual stream: two arrays in and two out.
        Rotation of queries and keys: one in, one out. The gate: two in, one out.
        """
        split = 2 * (of.heads + of.kv_heads) * of.head_dim + 3 * mlp
        values = of.layers * (8 * of.embed + split / self.mesh.model)
        return Part("between products", 0.0, BYTES[dtype] * mine * values)

    def _head(self, mine: int, dtype: str) -> list[Part]:
        """LM head, and its logits written and read once; each shard of the vocabulary
        tells the others a few numbers."""
        t, model = self.target, self.mesh.model
        logits = 2.0 * BYTES[dtype] * mine * t.vocab / model
        told = float(_STATISTICS_BYTES * mine * (model - 1))
        return [
            self._product("head", mine, t.head_params, dtype),
            Part("logits", 0.0, logits, told),
        ]

    def _reduced(self, of: Layers, mine: int, dtype: str) -> Part:
        """All-reduces over `model`: two a layer, and one of the embedding."""
        once = self._summed(mine, of.embed, dtype)
        return Part("all-reduce", 0.0, 0.0, (2 * of.layers + 1) * once)

    def _summed(self, mine: int, columns: int, dtype: str) -> float:
        """Bytes that a device sends so that rows are summed over `model`: in a ring,
        twice its share of the others' parts."""
        model = self.mesh.model
        return 2.0 * (model - 1) / model * mine * columns * BYTES[dtype]

    def _context(self, mine: int) -> Part:
        """The tapped states' projection, summed over `model`, and keys and values."""
        d = self._need_drafter()
        product = self._product("context", mine, d.context_params, self.draft_dtype)
        return replace(product, sent=self._summed(mine, d.embed, self.draft_dtype))

    def _need_drafter(self) -> DrafterShape:
        if self.drafter is None:
            raise CostError("expected the sizes of a drafter, found none; name one")
        return self.drafter


@dataclass(frozen=True)
class Fit:
    """Measured times as `fixed_ms + scale * roofline`: two constants.

    The first is what a step takes however little it does; the inverse of the second is
    the share of the peak rates that is reached.
    """

    fixed_ms: float
    scale: float

    def ms(self, roofline_ms: float) -> float:
        return self.fixed_ms + self.scale * roofline_ms


def fit(roofline_ms: Sequence[float], measured_ms: Sequence[float]) -> Fit:
    """Least squares of relative errors; neither constant is below 0.

    Raises:
      ValueError: not as many of one as of the other, none, or times that are not above
        0.
    """
    x, y = np.asarray(roofline_ms, float), np.asarray(measured_ms, float)
    if x.shape != y.shape or not x.size or min(x.min(), y.min()) <= 0:
        raise ValueError(
            f"expected as many measured times as computed ones, all above 0 ms, found "
            f"{list(measured_ms)} and {list(roofline_ms)}"
        )
    ones = 1 / y
    columns = np.stack([ones, x / y], axis=1)
    (fixed, scale), *_ = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)
    if fixed < 0 or len(set(x)) < 2:
        fixed, scale = 0.0, (x / y).sum() / ((x / y) ** 2).sum()
    elif scale < 0:
        fixed, scale = ones.sum() / (ones**2).sum(), 0.0
    return Fit(float(fixed), float(scale))
