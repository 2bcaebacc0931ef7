"""A peer's plain decoding as an arm: transformers (torch), same weights and prompts."""

import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

from dcut_jax.bench.records import PEER, Cell
from dcut_jax.bench.runner import Texts
from dcut_jax.engine.profile import cores
from dcut_jax.engine.requests import Request
from dcut_jax.weights.hf import save_hf
from dcut_jax.weights.load import Target


def require_torch() -> tuple[Any, Any]:
    """The modules `torch` and `transformers`.

    Raises:
      ImportError: one cannot be imported; says what to install.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(
            f"the peer needs torch and transformers, which cannot be imported "
            f"({error}); run `pip install torch transformers`"
        ) from error
    return torch, transformers


def choose_device(platform: str, torch: Any) -> str:
    """torch's name for the kind of device that JAX runs on; `platform` is JAX's.

    Raises:
      ValueError: torch has none of that kind.
    """
    if platform == "cpu":
        return "cpu"
    if platform == "gpu" and torch.cuda.is_available():
        return "cuda"
    raise ValueError(
        f"the peer has to run on the same kind of device as JAX, which runs on "
        f"{platform}; torch {torch.__version__} finds none such. Install a torch that "
        f"does, leave --peer out, or run both on the CPU with JAX_PLATFORMS=cpu"
    )


class TransformersPeer:
    """Greedy decoding by transformers, on a CPU with one thread per core.

    Where other jobs hold a core its threads wait for each other: on two busy cores it
    was forty times slower than with one thread. `Cell.load` tells of such a machine.

    On a GPU it shares the memory with JAX, which takes three quarters of it at the
    start unless XLA_PYTHON_CLIENT_PREALLOCATE=false.

    Raises:
      ImportError: torch or transformers is missing; says what to install.
      ValueError: torch does not reach the kind of device that JAX runs on.
    """

    def __init__(self, target: Target, requests: Sequence[Request]) -> None:
        torch, transformers = require_torch()
        self._torch = torch
        self._device = choose_device(jax.default_backend(), torch)
        torch.set_num_threads(cores())
        self.version = (
            f"{transformers.__version__}, torch {torch.__version__} on {self._device}"
        )
        self._requests = requests
        dtype = str(target.params["embed_VE"].dtype)
        with tempfile.TemporaryDirectory() as directory:
            save_hf(directory, target.cfg, target.params)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype)
            )
        self._model: Any = model.to(self._device).eval()

    def run_cell(
        self, batch: int, texts: Texts, *, round: int, tokens_per_request: int
    ) -> Cell:
        """Times `tokens_per_request` decode steps of one full batch.

        The prefill and one step before them, which warms up, are in no time. What comes
        out is checked against AR's text, as an arm's is.
        """
        first = round * batch
        picked = [(first + i) % len(self._requests) for i in range(batch)]
        with self._torch.inference_mode():
            decode = self._prefilled([self._requests[i].prompt for i in picked])
            decode(1)
            self._wait()
            start = time.perf_counter()
            token_BN = decode(tokens_per_request)
            self._wait()
            seconds = time.perf_counter() - start
        for prompt, tokens in zip(picked, token_BN.tolist(), strict=True):
            request = self._requests[prompt]
            text, finished = ended(tokens, request.max_new_tokens, request.stop)
            texts.check(PEER, batch, prompt, text, finished=finished)
        return Cell(
            batch=batch,
            arm=PEER,
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

    def _prefilled(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Reads prompts; returns a function of steps to run, to all tokens so far."""
        torch, batch, width = self._torch, len(prompts), max(map(len, prompts))
        token = torch.zeros((batch, width), dtype=torch.long)
        mask = torch.zeros((batch, width), dtype=torch.long)
        for row, ids in enumerate(prompts):  # on the left, as transformers decodes
            token[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        token, mask = token.to(self._device), mask.to(self._device)
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self._model(
            token,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            logits_to_keep=1,
        )
        position = position[:, -1:]
        emitted: list[Any] = [out.logits[:, -1].argmax(-1, keepdim=True)]

        def decode(steps: int) -> Any:
            nonlocal mask, position, out
            for _ in range(steps):
                mask = torch.cat([mask, torch.ones_like(emitted[-1])], dim=1)
                position = position + 1
                out = self._model(
                    emitted[-1],
                    attention_mask=mask,
                    position_ids=position,
                    past_key_values=out.past_key_values,
                    use_cache=True,
                )
                emitted.append(out.logits[:, -1].argmax(-1, keepdim=True))
            return torch.cat(emitted, dim=1)

        return decode

    def _wait(self) -> None:
        """Until the device has done all that was asked of it."""
        if self._device == "cuda":
            self._torch.cuda.synchronize()


def ended(
    tokens: Sequence[int], max_new_tokens: int, stop: Sequence[int]
) -> tuple[list[int], bool]:
    """The text as far as a request wants it, and whether it ends there."""
    text = list(tokens[:max_new_tokens])
    at = next((i for i, token in enumerate(text) if token in stop), None)
    if at is not None:
        text = text[: at + 1]
    return text, at is not None or len(text) == max_new_tokens
