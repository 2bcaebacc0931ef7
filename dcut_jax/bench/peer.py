"""A peer's plain decoding as an arm: transformers (torch), same weights and prompts."""

import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from dcut_jax.bench.records import Cell
from dcut_jax.weights.hf import save_hf
from dcut_jax.weights.load import Target

NAME = "transformers"


class TransformersPeer:
    """Greedy decoding by transformers, one thread per core.

    Raises:
      ImportError: torch or transformers is missing; says what to install.
    """

    def __init__(self, target: Target, ids: Sequence[Sequence[int]]) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ImportError(
                "the peer needs torch and transformers; "
                '`pip install "dcut-jax[parity]"`'
            ) from error
        self._torch = torch
        torch.set_num_threads(os.cpu_count() or 1)
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self._ids = ids
        dtype = str(target.params["embed_VE"].dtype)
        with tempfile.TemporaryDirectory() as directory:
            save_hf(directory, target.cfg, target.params)
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype)
            ).eval()

    def run_cell(self, batch: int, round: int, tokens_per_request: int) -> Cell:
        """Times `tokens_per_request` decode steps of one full batch; prefill apart."""
        torch = self._torch
        picked = [self._ids[(round * batch + i) % len(self._ids)] for i in range(batch)]
        width = max(map(len, picked))
        token = torch.zeros((batch, width), dtype=torch.long)
        mask = torch.zeros((batch, width), dtype=torch.long)
        for row, ids in enumerate(picked):  # on the left, as transformers decodes
            token[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.inference_mode():
            out = self._model(
                token,
                attention_mask=mask,
                position_ids=position,
                use_cache=True,
                logits_to_keep=1,
            )
            position = position[:, -1:]
            start = time.perf_counter()
            for _ in range(tokens_per_request):
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                mask = torch.cat([mask, torch.ones_like(token)], dim=1)
                position = position + 1
                out = self._model(
                    token,
                    attention_mask=mask,
                    position_ids=position,
                    past_key_values=out.past_key_values,
                    use_cache=True,
                )
            seconds = time.perf_counter() - start
        return Cell(
            batch=batch,
            arm=NAME,
            round=round,
            tokens=batch * tokens_per_request,
            steps=tokens_per_request,
            seconds=seconds,
            mean_accepted_length=1.0,
            kept_share=float("nan"),
            mean_width=0.0,
            phase_ms={},
            load=os.getloadavg()[0],
        )
