"""What was published of D-Cut and DFlash, and the step times that follow from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK = 16  # rows of a full block in the published cost tables
AR = "AR"


@dataclass(frozen=True)
class PublishedModel:
    """Rows of one target, by batch size.

    Attributes:
      tokens_per_s: by method, AR's and DFlash's.
      speed_up: over AR, by method; all of them.
      kept_share: rows verified, of all, by method; of D-Cut-B16.
      step_ms: by batch size and share of a full block that is verified.
    """

    name: str
    tokens_per_s: Mapping[str, tuple[float, ...]]
    speed_up: Mapping[str, tuple[float, ...]]
    kept_share: Mapping[str, tuple[float, ...]]
    step_ms: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True)
class Published:
    """The part of the published numbers that a replay needs.

    Attributes:
      source: where they are from.
      shares: of a block, the columns of `step_ms`.
      requests: of the allocation table.
      rows_each: tokens of a step in which each request verifies so many rows.
      rows_in_all: the same where so many rows went to the most confident drafts.
    """

    source: str
    batch_sizes: tuple[int, ...]
    shares: tuple[float, ...]
    models: tuple[PublishedModel, ...]
    requests: int
    rows_each: Mapping[int, float]
    rows_in_all: Mapping[int, float]

    def length(self, rows: int) -> float:
        """Tokens per request and step where each verifies `rows` rows."""
        return self.rows_each[rows] / self.requests


def load_published() -> Published:
    """Reads the file that ships with the package."""
    raw = json.loads(Path(__file__).with_name("published.json").read_text())
    allocation = raw["allocation"]
    return Published(
        source=raw["source"],
        batch_sizes=tuple(raw["batch_sizes"]),
        shares=tuple(raw["shares"]),
        models=tuple(
            PublishedModel(
                name,
                _rows(model["tokens_per_s"]),
                _rows(model["speed_up"]),
                _rows(model["kept_share"]),
                {int(k): tuple(v) for k, v in model["step_ms"].items()},
            )
            for name, model in raw["models"].items()
        ),
        requests=allocation["requests"],
        rows_each={int(k): v for k, v in allocation["rows_each"].items()},
        rows_in_all={int(k): v for k, v in allocation["rows_in_all"].items()},
    )


def _rows(raw: Mapping[str, list[float]]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(row) for name, row in raw.items()}


@dataclass(frozen=True)
class StepTimes:
    """How long the steps of one batch size take, ms of wall time.

    A published cost is that of a full step, drafting included. Drafting is taken to
    cost the same for every row of a block that is asked for.

    Attributes:
      slots: the batch size, B.
      rows_R: rows verified, rising: the anchors alone, then the shares of the table.
      verify_ms_R: without drafting. The anchors alone take what a step of AR takes.
      draft_row_ms: drafting one row for every request.
    """

    slots: int
    rows_R: tuple[int, ...]
    verify_ms_R: tuple[float, ...]
    draft_row_ms: float

    def draft_ms(self, width: int) -> float:
        """Drafting `width` tokens for every request: a pass over `width + 1` rows."""
        return self.draft_row_ms * (width + 1)

    def verify_ms(self, rows: int) -> float:
        """Verifying `rows` rows; straight lines between the published ones."""
        return float(np.interp(rows, self.rows_R, self.verify_ms_R))

    def full_ms(self, width: int) -> float:
        """A step of `width` drafts, all of them verified."""
        return self.draft_ms(width) + self.verify_ms(self.slots * (width + 1))


def fit_step_times(published: Published, model: PublishedModel) -> dict[int, StepTimes]:
    """Step times by batch size, fitted to AR's and DFlash's throughputs.

    Two things are unknown: how much longer a real step takes than the cost table says
    (prefill, the host, batches that run dry), and what drafting a row costs. DFlash-B16
    gives the first and DFlash-B8 the second, with accepted lengths from the allocation
    table; so DFlash-B8 is taken for a drafter as good as the first half of DFlash-B16.
    Where the table has a row for every batch size, both are the same for all of them,
    and how well ten throughputs are met tests that. Where it has one row, both are
    fitted for each batch size, and the table only says how much of a step is saved by
    verifying a smaller share: the same for every batch size, by assumption.
    """
    batch_B = np.array(published.batch_sizes)
    whole_table = set(published.batch_sizes) <= model.step_ms.keys()
    one_row = next(iter(model.step_ms.values()))
    table_BX = np.array([model.step_ms.get(b, one_row) for b in published.batch_sizes])

    def real_ms(method: str, rows: int) -> np.ndarray:
        """Of a step of fixed width, `[B]`."""
        tokens_B = published.length(rows) * batch_B
        return 1e3 * tokens_B / np.array(model.tokens_per_s[method])

    def agreed(value_B: np.ndarray) -> np.ndarray:
        return np.full_like(value_B, value_B.mean()) if whole_table else value_B

    full, half = published.shares.index(1.0), published.shares.index(0.5)
    log_slower_B = np.log(real_ms("DFlash-B16", BLOCK) / table_BX[:, full])
    real_BX = np.exp(agreed(log_slower_B))[:, None] * table_BX
    undrafted = BLOCK // 2  # rows per request that DFlash-B8 spares its drafter
    spared_B = real_BX[:, half] - real_ms("DFlash-B8", BLOCK // 2)
    draft_row_B = batch_B * agreed(spared_B / undrafted / batch_B)
    verify_BX = real_BX - BLOCK * draft_row_B[:, None]

    return {
        batch: StepTimes(
            slots=batch,
            rows_R=(batch, *(round(s * BLOCK * batch) for s in published.shares)),
            verify_ms_R=(1e3 * batch / model.tokens_per_s[AR][i], *verify_BX[i]),
            draft_row_ms=float(draft_row_B[i]),
        )
        for i, batch in enumerate(published.batch_sizes)
    }
