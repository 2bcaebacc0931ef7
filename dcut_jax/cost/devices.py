"""What devices can do at most: peak rates per device kind, each with its source.

Imports nothing but the standard library. The rates of a CPU are not in any data sheet
that could be relied on; `cost.host` measures them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dcut_jax.cost.table import HOW_TO_MEASURE, CostError


@dataclass(frozen=True)
class Device:
    """Peak rates of one device as JAX sees it.

    Attributes:
      name: short, for people.
      bf16_per_s, fp32_per_s: operations a second of dense products; None where no
        figure is published. bfloat16 stands for float16 too.
      memory_per_s: bytes a second between the device and its memory.
      memory_bytes: capacity.
      link_per_s: bytes a second that it can send to the others of its node or slice,
        one direction; 0 where it is alone.
      source: of the figures.
    """

    name: str
    bf16_per_s: float | None
    fp32_per_s: float | None
    memory_per_s: float
    memory_bytes: float
    link_per_s: float
    source: str

    def products_per_s(self, dtype: str) -> float:
        """Operations a second of products in `dtype`.

        Raises:
          CostError: none is published.
        """
        rate = self.fp32_per_s if dtype == "float32" else self.bf16_per_s
        if dtype not in ("float32", "bfloat16", "float16") or rate is None:
            raise CostError(
                f"no peak rate of {dtype} products is known for {self.name} "
                f"(source: {self.source}); {HOW_TO_MEASURE}"
            )
        return rate


@cache
def _data() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("devices.toml").read_text())


@cache
def known_devices() -> Mapping[str, Device]:
    """Every device kind of the data file, by its key."""
    return {key: _device(key, entry) for key, entry in _data().items()}


def find_device(kind: str) -> Device:
    """The device of that kind, by JAX's name for it or a short one, in any case.

    Raises:
      CostError: nothing is known of such a device. A rate is never made up: costs on
        it have to be measured.
    """
    wanted = kind.lower()
    found = [
        key
        for key, entry in _data().items()
        if wanted == key or wanted in (name.lower() for name in entry["names"])
    ]
    if not found:
        raise CostError(
            f"expected a device kind with published peak rates, found {kind!r}; known: "
            f"{', '.join(known_devices())}. On any other device costs are measured, "
            f"never computed: {HOW_TO_MEASURE} there"
        )
    return known_devices()[found[0]]


def _device(key: str, raw: Mapping[str, Any]) -> Device:
    share = raw.get("jax_devices", 1)

    def rate(name: str) -> float | None:
        return raw[name] / share if name in raw else None

    return Device(
        name=key,
        bf16_per_s=rate("bf16_per_s"),
        fp32_per_s=rate("fp32_per_s"),
        memory_per_s=raw["memory_per_s"] / share,
        memory_bytes=raw["memory_bytes"] / share,
        link_per_s=raw["link_per_s"] / share / 2,  # the file adds both directions
        source=raw["source"],
    )
