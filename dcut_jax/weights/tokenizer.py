"""Text to tokens and back, from a Hugging Face directory or from GGUF metadata."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dcut_jax.config import ConfigError
from dcut_jax.weights.errors import CheckpointError
from dcut_jax.weights.gguf import GgufFile
from dcut_jax.weights.json_io import read_json

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Kinds of token in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer with its chat template.

    Special tokens written out in a text are recognised, in `encode` as in `chat`.

    Attributes:
      eos_ids: tokens that end a text; may be empty.
      template: Jinja source of the chat template, if there is one.
      special: texts of special tokens by role (`bos_token`, ...), for the template.
      prefix: tokens put in front of a plain text.
      where: file, for messages.
    """

    backend: Tokenizer
    eos_ids: tuple[int, ...]
    template: str | None
    special: Mapping[str, str]
    where: str
    prefix: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Tokens known; a model's embedding may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the begin token if the model wants one."""
        return [*self.prefix, *self.backend.encode(text).ids]

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of tokens; special ones are left out unless asked for.

        Bytes that are not UTF-8 (a character that is not complete yet) become U+FFFD.
        """
        plain = [int(i) for i in ids]
        return self.backend.decode(plain, skip_special_tokens=not keep_special)

    def has_text(self, token: int) -> bool:
        """Whether `decode` writes it: not a special token, nor one that is unknown."""
        known = self.backend.id_to_token(token) is not None
        return known and token not in self._special_ids

    def spells_byte(self, token: int) -> bool:
        """Whether it is one byte of a character, in a vocabulary of characters.

        A run of such tokens is decoded as a whole, and is broken until it is whole.
        """
        return _BYTE.fullmatch(self.backend.id_to_token(token) or "") is not None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's text, up to where the assistant's answer begins.

        Raises:
          ConfigError: there is no template, or it refuses the messages.
        """
        if self.template is None:
            raise ConfigError(
                f"{self.where}: there is no chat template; supply one (beside a "
                f"tokenizer.json: chat_template.jinja, or `chat_template` in "
                f"tokenizer_config.json; in GGUF: `tokenizer.chat_template`), or use "
                f"an instruction-tuned checkpoint"
            )
        try:
            return _environment.from_string(self.template).render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=True,
                **self.special,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(
                f"{self.where}: the chat template fails on these messages: {error}; "
                f"expected a list of objects with `role` and `content`"
            ) from error

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation (`role`, `content`), ready to be answered.

        Raises:
          ConfigError: there is no template, or it refuses the messages.
        """
        text = self.render(messages)
        return self.backend.encode(text, add_special_tokens=False).ids


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


# Templates come with checkpoints, so they run in a sandbox. Names and settings are
# those that transformers gives to templates.
_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
_environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
_environment.filters["tojson"] = _to_json


def tokenizer_from_gguf(file: GgufFile) -> TextTokenizer:
    """Builds the tokenizer that GGUF metadata describes.

    Differs from transformers' conversion, which drops SmolLM's digit splitter, and
    agrees with llama.cpp.

    Raises:
      ConfigError: the tokenizer is of a kind that is not known.
    """
    model = file.require("tokenizer.ggml.model")
    kind = file.field("tokenizer.ggml.pre", "none")
    byte_level = {
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
        "qwen2": [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if model != "gpt2" or kind not in byte_level:
        raise ConfigError(
            f"{file.path}: tokenizer {model!r} with pre-tokenizer {kind!r} is not "
            f"supported; known: 'gpt2' with {', '.join(map(repr, byte_level))}. The "
            f"Hugging Face checkpoint has a tokenizer.json, which always works"
        )
    tokens = file.require("tokenizer.ggml.tokens")
    kinds = file.require("tokenizer.ggml.token_type")
    merges = file.require("tokenizer.ggml.merges")
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(byte_level[kind])
    backend.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in pairs
            if k == _CONTROL
        ]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, k in pairs if k == _USER_DEFINED]
    )
    ids = {
        role: file.field(f"tokenizer.ggml.{role}_token_id")
        for role in ("bos", "eos", "eot")
    }
    bos = ids["bos"]
    if bos is None and file.field("tokenizer.ggml.add_bos_token", False):
        raise ConfigError(f"{file.path}: add_bos_token is set, but no bos_token_id")
    return TextTokenizer(
        backend=backend,
        eos_ids=_unique(ids["eos"], ids["eot"]),
        template=file.field("tokenizer.chat_template"),
        special={
            f"{role}_token": tokens[ids[role]]
            for role in ("bos", "eos")
            if ids[role] is not None
        },
        where=str(file.path),
        prefix=(bos,) if file.field("tokenizer.ggml.add_bos_token", False) else (),
    )


def _unique(*ids: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_text(value: str | Mapping[str, Any] | None) -> str | None:
    """A special token's text, which older files wrap in an object."""
    return value["content"] if isinstance(value, Mapping) else value


def _hf_template(directory: Path, raw: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = raw.get("chat_template")
    if isinstance(template, list):  # several, by name
        return {t["name"]: t["template"] for t in template}.get("default")
    return template


def tokenizer_from_hf(directory: str | Path) -> TextTokenizer:
    """Reads `tokenizer.json` and the template and end tokens beside it.

    End tokens are those of `generation_config.json`, else of `config.json`, else the
    `eos_token` of `tokenizer_config.json`.

    Raises:
      CheckpointError: naming a file that is missing or broken.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; without it a checkpoint takes and gives token "
            f"ids only"
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises no narrower type
        raise CheckpointError(
            f"{path} is truncated or not a tokenizer: {error}; fetch it again"
        ) from error
    # What a trainer left in the file: it would cut prompts, or fill them up, unseen.
    backend.no_truncation()
    backend.no_padding()
    raw = _optional_json(directory / "tokenizer_config.json")
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {
        r: text for r in roles if (text := _special_text(raw.get(r))) is not None
    }
    eos: int | list[int] | None = None
    for name in ("generation_config.json", "config.json"):
        if eos is None:
            eos = _optional_json(directory / name).get("eos_token_id")
    if eos is None and "eos_token" in special:
        eos = backend.token_to_id(special["eos_token"])
    return TextTokenizer(
        backend=backend,
        eos_ids=_unique(*(eos if isinstance(eos, list) else [eos])),
        template=_hf_template(directory, raw),
        special=special,
        where=str(directory),
    )
