"""Between OpenAI's requests and answers, and the engine's."""

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dcut_jax.engine.requests import Likeliest, Origin, Request
from dcut_jax.serve import schema
from dcut_jax.serve.scheduler import News
from dcut_jax.serve.schema import BadField
from dcut_jax.serve.text import TextStream
from dcut_jax.stops import StopStrings
from dcut_jax.weights.tokenizer import TextTokenizer

Kind = Literal["chat", "completion"]

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
_LEAST_LOGPROB = -9999.0  # stands for minus infinity, as OpenAI has it
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
      name: of the model, in requests and answers.
      max_length: longest prompt plus output, in tokens.
      logprobs: whether there are any.
      likeliest: of how many tokens they are told beside the one that was taken.
      choices: texts that one request may ask for.
      plans: whether steps are planned, so that `tpot_ms` can be heeded.
    """

    name: str
    text: TextTokenizer
    max_length: int
    logprobs: bool
    choices: int
    likeliest: int = 0
    plans: bool = True
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Ask:
    """A request as it was understood.

    Attributes:
      requests: one per text, in the order of choices.
      stops: what ends the texts beside end tokens.
      top_logprobs: how many of the most likely tokens are listed.
      wait_s: time after which nobody wants the answer.
      prompt_tokens: of all prompts, each counted once.
    """

    kind: Kind
    requests: tuple[Request, ...]
    stops: StopStrings | None
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    origins: bool
    wait_s: float
    prompt_tokens: int


def parse_json(body: bytes) -> Any:
    """The value that a body holds.

    Raises:
      BadField: it is not JSON in UTF-8.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(body.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise BadField(
            f"The body is not UTF-8: byte {error.object[error.start]:#04x} at "
            f"{error.start}.",
            None,
            "invalid_encoding",
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadField(
            f"We could not parse the JSON body of your request: {error}.",
            None,
            "invalid_json",
        ) from error


def read_ask(kind: Kind, body: Any, served: Served) -> Ask:
    """What a parsed body asks for.

    Raises:
      BadField: it is not as the schema wants it, or asks for what cannot be.
    """
    schema.check(body, schema.CHAT if kind == "chat" else schema.COMPLETION)
    given = {k: v for k, v in body.items() if v is not None}
    if given["model"] != served.name:
        raise BadField(
            f"The model '{given['model']}' does not exist; this server has "
            f"'{served.name}'.",
            "model",
            "model_not_found",
        )
    prompts = _chat(given, served) if kind == "chat" else _prompts(given, served)
    n = int(given.get("n", 1))
    if len(prompts) * n > served.choices:
        raise BadField(
            f"n: {len(prompts)} prompts with {n} texts each are {len(prompts) * n}; "
            f"this server gives at most {served.choices} at a time.",
            "n",
            "invalid_value",
        )
    if "tpot_ms" in given and not served.plans:
        raise BadField(
            "tpot_ms: this server plans no steps by it; leave it out, or ask one that "
            "was started with --mode dcut.",
            "tpot_ms",
            "unsupported_parameter",
        )
    logprobs, top = _logprobs(kind, given, served)
    options = given.get("stream_options", {})
    stream = given.get("stream", False)
    if options and not stream:
        raise BadField(
            "stream_options: only with stream.", "stream_options", "invalid_value"
        )
    stops = _stops(given, served)
    try:
        requests = tuple(
            Request(
                tuple(prompt),
                _new_tokens(kind, given, served, len(prompt)),
                () if given.get("ignore_eos") else served.text.eos_ids,
                temperature=float(given.get("temperature", 1.0)),
                top_k=int(given.get("top_k", 0)),
                top_p=float(given.get("top_p", 1.0)),
                min_p=float(given.get("min_p", 0.0)),
                seed=_wrapped(seed + i),
                halt=stops,
                priority=float(given.get("priority", 1.0)),
                tpot_ms=float(given.get("tpot_ms", math.inf)),
            )
            for seed in [int(given.get("seed", secrets.randbelow(2**31 - 2**10)))]
            for prompt in prompts
            for i in range(n)
        )
    except ValueError as error:
        raise BadField(str(error), None, "invalid_value") from error
    return Ask(
        kind=kind,
        requests=requests,
        stops=stops,
        stream=stream,
        include_usage=options.get("include_usage", False),
        logprobs=logprobs,
        top_logprobs=top,
        origins=given.get("return_origins", False),
        wait_s=given.get("deadline_ms", math.inf) / 1e3,
        prompt_tokens=sum(map(len, prompts)),
    )


def _wrapped(seed: int) -> int:
    """The seed where it fits into 32 bits; past the largest comes the least."""
    return (seed + 2**31) % 2**32 - 2**31


def _chat(given: Mapping[str, Any], served: Served) -> list[list[int]]:
    """The one prompt of a conversation."""
    messages = [
        {
            "role": "system" if m["role"] == "developer" else m["role"],
            "content": m["content"]
            if isinstance(m["content"], str)
            else "".join(part["text"] for part in m["content"]),
        }
        for m in given["messages"]
    ]
    try:
        return [served.text.chat(messages)]
    except ValueError as error:  # no template, or one that refuses
        raise BadField(str(error), "messages", "invalid_value") from error


def _prompts(given: Mapping[str, Any], served: Served) -> list[list[int]]:
    """The prompts of a completion, in tokens."""
    prompt = given["prompt"]
    if isinstance(prompt, str) or not isinstance(prompt[0], str | list):
        prompt = [prompt]
    found = [
        served.text.encode(p) if isinstance(p, str) else [int(t) for t in p]
        for p in prompt
    ]
    if not all(found):
        raise BadField(
            "prompt: expected at least one token, found a text that has none.",
            "prompt",
            "invalid_value",
        )
    return found


def _new_tokens(
    kind: Kind, given: Mapping[str, Any], served: Served, prompt: int
) -> int:
    """Most tokens of a text whose prompt has so many."""
    both = [given[k] for k in ("max_completion_tokens", "max_tokens") if k in given]
    if len(set(both)) > 1:
        raise BadField(
            "max_tokens and max_completion_tokens differ; give one of them.",
            "max_tokens",
            "invalid_value",
        )
    room = served.max_length - prompt
    wanted = int(both[0]) if both else room
    if not both and kind == "completion":
        wanted = min(DEFAULT_TOKENS, max(room, 1))
    if room < 1 or wanted > room:
        asked = f" and {wanted} tokens to come" if both else ""
        raise BadField(
            f"This model's context length is {served.max_length} tokens. The prompt "
            f"has {prompt}{asked}; shorten the prompt or ask for fewer.",
            "messages" if kind == "chat" else "prompt",
            "context_length_exceeded",
        )
    return wanted


def _logprobs(kind: Kind, given: Mapping[str, Any], served: Served) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and of how many of the likeliest tokens."""
    asked = given.get("logprobs", False)
    wanted = asked if kind == "chat" else asked is not False
    top = int(given.get("top_logprobs", 0)) if kind == "chat" else int(asked)
    if "top_logprobs" in given and not wanted:
        raise BadField(
            "top_logprobs: only with logprobs.", "top_logprobs", "invalid_value"
        )
    if wanted and not served.logprobs:
        raise BadField(
            "logprobs: this server was started with --no-logprobs.",
            "logprobs",
            "unsupported_parameter",
        )
    taken = top == 1 and given.get("temperature", 1.0) == 0  # then it is the likeliest
    if top > served.likeliest and not taken:
        name = "top_logprobs" if kind == "chat" else "logprobs"
        raise BadField(
            f"{name}: this server tells the {served.likeliest} most likely tokens, and "
            f"with temperature 0 the one that is taken; ask for no more, or start it "
            f"with --likeliest {top}.",
            name,
            "unsupported_parameter",
        )
    return wanted, top


def _stops(given: Mapping[str, Any], served: Served) -> StopStrings | None:
    stop = given.get("stop", [])
    strings = [stop] if isinstance(stop, str) else stop
    if not strings:
        return None
    try:
        return StopStrings(served.text, strings)
    except ValueError as error:
        raise BadField(str(error), "stop", "invalid_value") from error


# -- answers -------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """What one token brought: its id, log-probability, origin, and certain text.

    `offset`: where its own text begins, in characters; of a part of a character, where
    that begins.
    `likeliest`: the most likely tokens in its place, as many as the server tells; where
    it tells none, the one that was taken.
    """

    token: int
    logprob: float | None
    origin: Origin
    text: str
    offset: int
    likeliest: Likeliest = ()


class Choice:
    """One text as it grows."""

    def __init__(self, index: int, ask: Ask, served: Served) -> None:
        self.index = index
        self.ask = ask
        self.finish: str | None = None
        self.pieces: list[Piece] = []
        self._decode = served.text.decode
        self._stream = TextStream(served.text, ask.stops)

    def take(self, news: News) -> list[Piece]:
        """Takes in news of a text that goes well; returns what they brought."""
        logprobs = news.logprobs or (None,) * len(news.tokens)
        likeliest = news.likeliest or ((),) * len(news.tokens)
        found = [
            Piece(
                token,
                logprob,
                origin,
                offset=self._stream.length,
                text=self._stream.add(token),
                likeliest=some or ((token, _finite(logprob)),),
            )
            for token, logprob, origin, some in zip(
                news.tokens, logprobs, news.origins, likeliest, strict=True
            )
        ]
        if news.end is not None:
            self.finish = news.end
            # A text ends with a token, which then also has what was held back.
            found[-1] = replace(found[-1], text=found[-1].text + self._stream.end())
        self.pieces += found
        return found

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.pieces)

    def details(self, some: Sequence[Piece]) -> dict[str, Any]:
        """`logprobs`, and `origins` where they were asked for."""
        found: dict[str, Any] = {"logprobs": self._logprobs(some)}
        if self.ask.origins:
            found["origins"] = [
                {"text": p.text, "origin": p.origin} for p in some if p.text
            ]
        return found

    def _logprobs(self, some: Sequence[Piece]) -> dict[str, Any] | None:
        if not self.ask.logprobs:
            return None
        known = [
            (self._decode([p.token], keep_special=True), _finite(p.logprob), p)
            for p in some
        ]
        if self.ask.kind == "chat":
            content = [
                _entry(token, logprob)
                | {"top_logprobs": [_entry(*pair) for pair in self._top(piece)]}
                for token, logprob, piece in known
            ]
            return {"content": content, "refusal": None}
        # The one that was taken is always there, as with OpenAI.
        top = [dict(self._top(p)) | {t: logprob} for t, logprob, p in known]
        return {
            "tokens": [token for token, _, _ in known],
            "token_logprobs": [logprob for _, logprob, _ in known],
            "top_logprobs": top if self.ask.top_logprobs else None,
            "text_offset": [piece.offset for piece in some],
        }

    def _top(self, piece: Piece) -> list[tuple[str, float]]:
        """The most likely tokens in a place, as text, as many as were asked for."""
        some = piece.likeliest[: self.ask.top_logprobs]
        return [
            (self._decode([token], keep_special=True), _finite(logprob))
            for token, logprob in some
        ]


def _finite(logprob: float | None) -> float:
    return max(logprob if logprob is not None else _LEAST_LOGPROB, _LEAST_LOGPROB)


def _entry(token: str, logprob: float) -> dict[str, Any]:
    # A token that is part of a character has no text, and its bytes are not known here.
    code = None if _BROKEN in token else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": code}


class Answer:
    """The bodies of one answer."""

    def __init__(self, ask: Ask, served: Served) -> None:
        prefix = "chatcmpl" if ask.kind == "chat" else "cmpl"
        self.ask = ask
        self.choices = [Choice(i, ask, served) for i in range(len(ask.requests))]
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }

    def whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """All at once."""
        chat = self.ask.kind == "chat"
        return {
            **self._head,
            "object": "chat.completion" if chat else "text_completion",
            "choices": [self._whole_choice(c) for c in self.choices],
            "usage": usage,
        }

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        said = (
            {"message": message} if self.ask.kind == "chat" else {"text": choice.text}
        )
        return {
            "index": choice.index,
            **said,
            **choice.details(choice.pieces),
            "finish_reason": choice.finish,
        }

    def first(self) -> list[dict[str, Any]]:
        """Pieces of a stream before there is any text: in a chat, who speaks."""
        if self.ask.kind != "chat":
            return []
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [
            self._piece([{"index": c.index, **said, "finish_reason": None}])
            for c in self.choices
        ]

    def piece(self, choice: Choice, some: Sequence[Piece]) -> dict[str, Any] | None:
        """A piece of a stream; None where nothing is to be said yet."""
        text = "".join(p.text for p in some)
        if not text and choice.finish is None and not self.ask.logprobs:
            return None
        said: dict[str, Any] = {"text": text}
        if self.ask.kind == "chat":
            said = {"delta": {"content": text} if text else {}}
        details = {**said, **choice.details(some), "finish_reason": choice.finish}
        return self._piece([{"index": choice.index, **details}])

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The piece with the usage, behind all others."""
        return self._piece([]) | {"usage": usage}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = self.ask.kind == "chat"
        usage = {"usage": None} if self.ask.include_usage else {}
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **usage}

    def usage(self, verified: int) -> dict[str, Any]:
        """Tokens of the whole answer, for which so many drafts were checked."""
        pieces = [p for c in self.choices for p in c.pieces]
        accepted = sum(p.origin == "draft" for p in pieces)
        tokens = len(pieces)
        return {
            "prompt_tokens": self.ask.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.ask.prompt_tokens + tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": verified - accepted,
            },
        }
