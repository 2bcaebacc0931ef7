"""Prompts to decode: sets that ship with the project, or one's own file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY = Path(__file__).with_name("prompt_data")
SETS = ("gsm8k", "humaneval", "mt_bench")
DEFAULT = "default"
RANDOM = "random:"  # before a number: prompts of so many random tokens
# One turn of the default mix. It divides every set evenly, so no set runs out first.
MIX = ("gsm8k", "humaneval", "gsm8k", "mt_bench")


class PromptError(ValueError):
    """Prompts that are not there, or a file that does not hold any."""


@dataclass(frozen=True)
class Prompt:
    """One conversation, ready for a chat template.

    Attributes:
      messages: objects with `role` and `content`; the last one waits for an answer.
      source: where the text comes from: a repository and commit, or file and line.
      license: of the text; "" where its file does not say.
      id: name within its source, "" without one.
    """

    messages: tuple[Mapping[str, str], ...]
    source: str
    license: str = ""
    id: str = ""


def load_prompts(source: str | Path, limit: int | None = None) -> list[Prompt]:
    """Loads prompts, in an order that is always the same.

    Args:
      source: a name, "default" (two prompts of gsm8k for one of humaneval and one of
        mt_bench, interleaved), "gsm8k", "humaneval" or "mt_bench"; or the path of a
        JSON Lines file. A line is an object with `prompt`, the user's text, or
        `messages`, a conversation, which wins where both are there. `id`, `source` and
        `license` are kept, other fields are ignored. Blank lines are skipped.
      limit: keep only so many from the start; None keeps all.

    Raises:
      PromptError: naming file and line, where there is nothing to decode.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"expected a limit of at least 1 prompt, found {limit}")
    if source == DEFAULT:
        prompts = _mix()
    elif source in SETS:
        prompts = read_prompt_file(DIRECTORY / f"{source}.jsonl")
    else:
        prompts = read_prompt_file(Path(source))
    return prompts[:limit]


def _mix() -> list[Prompt]:
    rest = {name: iter(read_prompt_file(DIRECTORY / f"{name}.jsonl")) for name in SETS}
    turns = zip(*(rest[name] for name in MIX), strict=False)
    return list(chain.from_iterable(turns))


def read_prompt_file(path: Path) -> list[Prompt]:
    """Reads a JSON Lines file; see `load_prompts`."""
    if not path.is_file():
        found = "a directory" if path.is_dir() else "nothing"
        raise PromptError(
            f"prompts {str(path)!r}: expected one of {', '.join((DEFAULT, *SETS))}, or "
            f"a JSON Lines file, found {found} there; check the name or path"
        )
    try:
        with path.open(encoding="utf-8-sig") as file:  # a byte order mark may lead
            numbered = [(n, line.strip()) for n, line in enumerate(file, 1)]
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x}"
        raise PromptError(
            f"{path}: expected UTF-8 text, found {found}; convert the file"
        ) from error
    numbered = [(n, line) for n, line in numbered if line]
    if not numbered:
        raise PromptError(
            f"{path}: expected a prompt on each line, found an empty file; "
            f'add lines such as {{"prompt": "..."}}'
        )
    return [_parse(line, f"{path}:{n}") for n, line in numbered]


def _parse(line: str, where: str) -> Prompt:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{where}: expected a JSON object, found text that is not JSON "
            f"({error.msg} at column {error.colno}); correct or drop this line"
        ) from error
    if not isinstance(raw, dict):
        raise PromptError(
            f"{where}: expected a JSON object with `prompt` or `messages`, found "
            f'{type(raw).__name__}; write {{"prompt": ...}}'
        )
    return Prompt(
        messages=_messages(raw, where),
        source=str(raw.get("source", where)),
        license=str(raw.get("license", "")),
        id=str(raw.get("id", "")),
    )


def _messages(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, str], ...]:
    key = next((k for k in ("messages", "prompt") if raw.get(k) is not None), None)
    if key is None:
        raise PromptError(
            f"{where}: expected `prompt` or `messages`, found "
            f"{', '.join(sorted(raw)) or 'no field at all'}; add one or drop this line"
        )
    given = raw[key]
    messages = given if key == "messages" else [{"role": "user", "content": given}]
    fine = isinstance(messages, list) and all(map(_is_message, messages))
    if not fine or not messages:
        raise PromptError(
            f"{where}: expected `prompt` to be a text, or `messages` a list of objects "
            f"with the texts `role` and `content`, in Unicode and none of them empty, "
            f"found {_shorten(given)}; correct or drop this line"
        )
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    texts = (message.get("role"), message.get("content"))
    return all(
        isinstance(text, str) and text.strip() and is_unicode(text) for text in texts
    )


def is_unicode(text: str) -> bool:
    """Whether a text is one: bytes that are none reach Python as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def random_length(source: str | Path) -> int | None:
    """The tokens of each prompt that "random:LENGTH" asks for; None for other sources.

    Raises:
      PromptError: a length that is none.
    """
    text = str(source)
    if not text.startswith(RANDOM):
        return None
    length = text.removeprefix(RANDOM)
    if not length.isdecimal() or not int(length):
        raise PromptError(
            f"prompts {text!r}: expected {RANDOM} and the number of tokens of each, at "
            f"least 1, as in {RANDOM}64"
        )
    return int(length)


def random_ids(length: int, count: int, vocab: int) -> list[tuple[int, ...]]:
    """Prompts of random tokens, the same ones each time; for random weights."""
    ids_NL = np.random.default_rng(0).integers(0, vocab, (count, length))
    return [tuple(row) for row in ids_NL.tolist()]
