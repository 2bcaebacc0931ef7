"""What the API takes and gives: one description, which checks requests and is served.

Requests are checked by the very schemas that `/openapi.json` shows. They use a small
part of JSON Schema, all of which `check` knows. Source of names and meanings: OpenAI's
API reference; what is this server's own says so.
"""

import math
from collections.abc import Mapping
from typing import Any

from dcut_jax.prompts import is_unicode

Schema = Mapping[str, Any]
_INT32 = {"minimum": -(2**31), "maximum": 2**31 - 1}


class BadField(Exception):
    """A request that is not as the schema wants it.

    Attributes:
      param: the field; None where it is the request as a whole.
      code: a short word for programs.
    """

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def text(note: str, **more: Any) -> Schema:
    """A string in Unicode."""
    return {"type": "string", "description": note, **more}


def number(note: str, **more: Any) -> Schema:
    return {"type": "number", "description": note, **more}


def integer(note: str, **more: Any) -> Schema:
    return {"type": "integer", "description": note, **more}


def boolean(note: str) -> Schema:
    return {"type": "boolean", "description": note}


def array(note: str, items: Schema, **more: Any) -> Schema:
    return {"type": "array", "description": note, "items": items, **more}


def only(*values: Any) -> Schema:
    """A field of OpenAI's that this server has in its neutral form alone."""
    said = ", ".join("null" if v is None else str(v) for v in values)
    note = f"Not supported; may be left out, or be {said}."
    return {"enum": list(values), "description": note, "x-unsupported": True}


def thing(
    properties: Mapping[str, Schema], required: tuple[str, ...] = (), note: str = ""
) -> Schema:
    """An object that has no other fields."""
    return {
        "type": "object",
        "description": note,
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def either(note: str, *some: Schema) -> Schema:
    """A value of the first of these that has its type."""
    return {"description": note, "anyOf": list(some)}


def optional(schema: Schema) -> Schema:
    """The same, or null, which means that the field was left out."""
    return {"anyOf": [schema, {"type": "null"}], "description": schema["description"]}


_TOKENS = array("Token ids.", integer("", minimum=0, maximum=2**31 - 1), minItems=1)
_METADATA = {
    "type": "object",
    "description": "Taken, and not looked at.",
    "additionalProperties": {"type": "string"},
    "maxProperties": 16,
}

# What both kinds of request have.
_COMMON: dict[str, Schema] = {
    "model": text("A name that /v1/models lists."),
    "n": integer("Texts per prompt; the i-th has seed + i.", minimum=1, maximum=128),
    "stop": either(
        "The text ends before the first of these to be complete.",
        text("", minLength=1),
        array("", text("", minLength=1), maxItems=4),
    ),
    "stream": boolean("Whether the text comes in pieces, as server-sent events."),
    "stream_options": thing(
        {
            "include_usage": boolean("Whether a last piece has the usage."),
            "include_obfuscation": only(False),
        },
        note="Only with stream.",
    ),
    "seed": integer(
        "Of the draws; the same seed draws the same text. Left out: a random one.",
        **_INT32,
    ),
    "temperature": number(
        "Divides the logits; 0 takes the most likely tokens. Default: 1.",
        minimum=0,
        maximum=2,
    ),
    "top_p": number(
        "Draw from the likeliest tokens that sum to this; 1 keeps all.",
        exclusiveMinimum=0,
        maximum=1,
    ),
    "max_tokens": integer("Most tokens of a text.", minimum=1, maximum=2**31 - 1),
    "user": text("Taken, and not looked at."),
    "metadata": _METADATA,
    "safety_identifier": text("Taken, and not looked at."),
    "prompt_cache_key": text(
        "Taken, and not looked at: prompts that begin alike are found without it."
    ),
    "frequency_penalty": only(0, None),
    "presence_penalty": only(0, None),
    "logit_bias": only({}, None),
    # This server's own.
    "top_k": integer(
        "Own extension. Draw from the k likeliest tokens; 0 keeps all.",
        minimum=0,
        maximum=2**31 - 1,
    ),
    "min_p": number(
        "Own extension. Draw no token below this share of the likeliest.",
        minimum=0,
        maximum=1,
    ),
    "ignore_eos": boolean("Own extension. Whether end tokens do not end the text."),
    "priority": number(
        "Own extension. What this request is worth beside others, in the queue and "
        "where drafts are cut. Default: 1.",
        minimum=0.01,
        maximum=100,
    ),
    "tpot_ms": number(
        "Own extension. Longest time that a token may take, ms; only of a server that "
        "decodes by D-Cut.",
        exclusiveMinimum=0,
        maximum=1e9,
    ),
    "deadline_ms": number(
        "Own extension. Time after which nobody wants the answer, ms: it ends with an "
        "error, 408.",
        exclusiveMinimum=0,
        maximum=1e9,
    ),
    "return_origins": boolean(
        "Own extension. Whether choices say how each piece of text came: draft, bonus "
        "(the target's own after drafts) or plain."
    ),
}

_PART = thing(
    {"type": {"enum": ["text"], "description": "No other kind."}, "text": text("")},
    ("type", "text"),
)
_MESSAGE = thing(
    {
        "role": {
            "enum": ["system", "developer", "user", "assistant"],
            "description": "A developer is a system. Tools are not supported.",
        },
        "content": either("", text(""), array("", _PART, minItems=1)),
        # Answers of this API come back with these.
        "name": only(None),
        "refusal": only(None),
        "audio": only(None),
        "annotations": only([], None),
        "function_call": only(None),
        "tool_calls": only([], None),
    },
    ("role", "content"),
)

_UNSUPPORTED_CHAT = {
    "audio": only(None),
    "function_call": only("none", None),
    "functions": only([], None),
    "modalities": only(["text"], None),
    "moderation": only(None),
    "parallel_tool_calls": only(True, None),
    "prediction": only(None),
    "prompt_cache_retention": only(None),
    "reasoning_effort": only(None),
    "response_format": only({"type": "text"}, None),
    "service_tier": only("auto", "default", None),
    "store": only(False, None),
    "tool_choice": only("none", "auto", None),
    "tools": only([], None),
    "verbosity": only(None),
    "web_search_options": only(None),
}

# Beside `model`, what null stands in for as if the field were not there.
_NOT_NULL = ("model", "messages", "prompt")


def _request(fields: Mapping[str, Schema], required: tuple[str, ...]) -> Schema:
    nullable = {
        name: schema
        if name in _NOT_NULL or schema.get("x-unsupported")
        else optional(schema)
        for name, schema in fields.items()
    }
    return thing(nullable, required)


CHAT: Schema = _request(
    {
        "messages": array("The conversation so far.", _MESSAGE, minItems=1),
        **_COMMON,
        "max_completion_tokens": integer(
            "Most tokens of a text. Default: what the context has room for.",
            minimum=1,
            maximum=2**31 - 1,
        ),
        "logprobs": boolean("Whether tokens come with their log-probabilities."),
        "top_logprobs": integer(
            "How many of the most likely tokens come with each, as far as this server "
            "tells them; with temperature 0 always 1, the token that was taken.",
            minimum=0,
            maximum=20,
        ),
        **_UNSUPPORTED_CHAT,
    },
    ("model", "messages"),
)

COMPLETION: Schema = _request(
    {
        "prompt": either(
            "One or several prompts, as texts or as token ids.",
            text("", minLength=1),
            array("", text("", minLength=1), minItems=1, maxItems=128),
            _TOKENS,
            array("", _TOKENS, minItems=1, maxItems=128),
        ),
        **_COMMON,
        "logprobs": integer(
            "Tokens come with their log-probabilities, and with those of so many of "
            "the most likely ones; see top_logprobs of chats.",
            minimum=0,
            maximum=5,
        ),
        "best_of": only(1, None),
        "echo": only(False, None),
        "suffix": only("", None),
    },
    ("model", "prompt"),
)


def check(value: Any, schema: Schema, path: str = "") -> None:
    """Raises `BadField` where a value, as JSON gives it, is not what a schema wants."""
    where = path or "the request"
    if "anyOf" in schema:
        some = [s for s in schema["anyOf"] if _is_type(value, s.get("type"))]
        if not some:
            raise _wrong(value, _names(schema), path)
        for i, one in enumerate(some):
            try:
                return check(value, one, path)
            except BadField:
                if i == len(some) - 1:
                    raise
    if "enum" in schema:
        if not any(_same(value, v) for v in schema["enum"]):
            raise _not_among(value, schema, path)
        return None
    if not _is_type(value, schema.get("type")):
        raise _wrong(value, schema["type"], path)
    match value:
        case str():
            if not is_unicode(value):
                raise BadField(
                    f"{where}: expected Unicode, found half of a surrogate pair",
                    path or None,
                    "invalid_unicode",
                )
            _check_size(len(value), schema, "Length", where, path)
        case bool() | None:
            pass
        case int() | float():
            _check_range(value, schema, where, path)
        case list():
            _check_size(len(value), schema, "Items", where, path)
            for i, item in enumerate(value):
                check(item, schema["items"], f"{path}[{i}]")
        case dict():
            _check_fields(value, schema, path)
    return None


def _check_fields(value: dict[str, Any], schema: Schema, path: str) -> None:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    _check_size(len(value), schema, "Properties", path or "the request", path)
    for name in schema.get("required", ()):
        if name not in value:
            at = _join(path, name)
            raise BadField(
                f"Missing required parameter: '{at}'.", at, "missing_required_parameter"
            )
    for name, item in value.items():
        at = _join(path, name)
        if name in known:
            check(item, known[name], at)
        elif isinstance(others, Mapping):
            check(item, others, ascii(at)[1:-1])  # a name of the client's own
        else:
            shown = ascii(at)[1:-1][:100]
            raise BadField(
                f"Unrecognized request argument supplied: {shown}. Known ones: "
                f"{', '.join(known)}.",
                shown,
                "unknown_parameter",
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_type(value: Any, kind: str | None) -> bool:
    match kind:
        case None:
            return True
        case "integer":
            whole = isinstance(value, float) and value.is_integer()
            return (isinstance(value, int) or whole) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
    types = {"string": str, "boolean": bool, "array": list, "object": dict}
    return value is None if kind == "null" else isinstance(value, types[kind])


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON, where true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _names(schema: Schema) -> str:
    kinds = (s.get("type", "one of a few values") for s in schema["anyOf"])
    return " or ".join(dict.fromkeys(kinds))


def _shown(value: Any) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _wrong(value: Any, wanted: str, path: str) -> BadField:
    return BadField(
        f"Invalid type for '{path or 'the request'}': expected {wanted}, found "
        f"{_shown(value)}.",
        path or None,
        "invalid_type",
    )


def _not_among(value: Any, schema: Schema, path: str) -> BadField:
    if schema.get("x-unsupported"):
        return BadField(
            f"'{path}' is not supported by this server; leave it out. Found "
            f"{_shown(value)}.",
            path,
            "unsupported_parameter",
        )
    wanted = ", ".join(map(str, schema["enum"]))
    return BadField(
        f"Invalid value for '{path}': expected one of {wanted}, found {_shown(value)}.",
        path,
        "invalid_value",
    )


def _check_size(size: int, schema: Schema, what: str, where: str, path: str) -> None:
    least = schema.get(f"min{what}", 0)
    most = schema.get(f"max{what}", math.inf)
    if not least <= size <= most:
        wanted = f"at least {least}" if size < least else f"at most {most}"
        raise BadField(
            f"{where}: expected a {what.lower()} of {wanted}, found {size}.",
            path or None,
            "invalid_value",
        )


def _check_range(value: float, schema: Schema, where: str, path: str) -> None:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    over = schema.get("exclusiveMinimum", -math.inf)
    if low <= value <= high and value > over:  # also refuses NaN
        return
    wanted = f"above {over}" if over > -math.inf else f"at least {low}"
    raise BadField(
        f"{where}: expected a number {wanted} and at most {high}, found {value}.",
        path or None,
        "invalid_value",
    )
