"""The OpenAPI document: routes and answers; requests are described in `schema`."""

from importlib import metadata
from typing import Any

from dcut_jax.serve.schema import (
    CHAT,
    COMPLETION,
    Schema,
    array,
    integer,
    number,
    text,
)


def _open(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object of an answer, which may have more fields some day."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
    }


_ERROR = _open(
    {
        "error": _open(
            {
                "message": text("What was expected, what was found, what to do."),
                "type": text("invalid_request_error, or server_error."),
                "param": {"type": ["string", "null"]},
                "code": text("A word for programs."),
            }
        )
    }
)
_USAGE = _open(
    {
        "prompt_tokens": integer("Each prompt once."),
        "completion_tokens": integer("Of all choices."),
        "total_tokens": integer(""),
        "completion_tokens_details": _open(
            {
                "accepted_prediction_tokens": integer("Drafts that are in the text."),
                "rejected_prediction_tokens": integer("Drafts checked in vain."),
            }
        ),
    }
)
_FINISH = {"enum": ["stop", "length", None]}
_ORIGINS = array(
    "With return_origins.",
    _open({"text": text(""), "origin": {"enum": ["plain", "draft", "bonus"]}}),
)
_CHAT_LOGPROBS = {
    "type": ["object", "null"],
    "properties": {
        "content": array(
            "",
            _open(
                {
                    "token": text(""),
                    "logprob": number("Before temperature and cuts."),
                    "bytes": {"type": ["array", "null"], "items": integer("")},
                    "top_logprobs": array("", {"type": "object"}),
                }
            ),
        )
    },
}
_LOGPROBS = {
    "type": ["object", "null"],
    "properties": {
        "tokens": array("", text("")),
        "token_logprobs": array("", number("")),
        "top_logprobs": {"type": ["array", "null"], "items": {"type": "object"}},
        "text_offset": array("", integer("")),
    },
}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return _open(
        {
            "id": text(""),
            "object": {"const": kind},
            "created": integer("Seconds since 1970."),
            "model": text(""),
            "choices": array("", choice),
            "usage": _USAGE,
        }
    )


_CHAT_ANSWER = _answer(
    "chat.completion",
    _open(
        {
            "index": integer(""),
            "message": _open({"role": {"const": "assistant"}, "content": text("")}),
            "logprobs": _CHAT_LOGPROBS,
            "finish_reason": _FINISH,
            "origins": _ORIGINS,
        },
        *("index", "message", "finish_reason"),
    ),
)
_COMPLETION_ANSWER = _answer(
    "text_completion",
    _open(
        {
            "index": integer(""),
            "text": text(""),
            "logprobs": _LOGPROBS,
            "finish_reason": _FINISH,
            "origins": _ORIGINS,
        },
        *("index", "text", "finish_reason"),
    ),
)
_MODEL = _open(
    {
        "id": text(""),
        "object": {"const": "model"},
        "created": integer(""),
        "owned_by": text(""),
        "max_model_len": integer("Longest prompt plus output, in tokens."),
    }
)
_RETRY = {"Retry-After": {"schema": integer("Seconds."), "description": "When to ask."}}


def _json(note: str, schema: Schema, **more: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"description": note, "content": content, **more}


def _errors(*codes: int) -> dict[str, Any]:
    notes = {
        400: "The request is not as it has to be; `param` names the field.",
        401: "A key is wanted, and this is none.",
        404: "There is no such model.",
        408: "The body, or the answer, took too long.",
        413: "The body is too long.",
        415: "The body is not said to be JSON.",
        429: "This client has as many requests under way as it may have.",
        500: "The model's scores for this text are not finite.",
        503: "The queue is full, or the server is shutting down.",
    }
    retry = {429: {"headers": _RETRY}, 503: {"headers": _RETRY}}
    return {str(c): _json(notes[c], _ERROR, **retry.get(c, {})) for c in codes}


def _post(
    name: str, note: str, request: Schema, answer: dict[str, Any]
) -> dict[str, Any]:
    done = _json("The text, or with `stream` its pieces.", answer)
    event = _open({"data": text("A piece as JSON, an error, or [DONE].")})
    done["content"]["text/event-stream"] = {"schema": event}
    body = {"required": True, "content": {"application/json": {"schema": request}}}
    return {
        "operationId": name,
        "summary": note,
        "requestBody": body,
        "responses": {
            "200": done,
            **_errors(400, 401, 404, 408, 413, 415, 429, 500, 503),
        },
    }


def _get(name: str, note: str, answer: dict[str, Any], *errors: int) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": note,
        "responses": {"200": answer, **_errors(*errors)},
    }


def document(model: str, keys: bool) -> dict[str, Any]:
    """The document of a server of `model`, with or without keys."""
    plain = {"description": "", "content": {"text/plain": {"schema": text("")}}}
    page = {"description": "", "content": {"text/html": {"schema": text("")}}}
    status = _json("", _open({"status": text("")}))
    models = _json("", _open({"object": {"const": "list"}, "data": array("", _MODEL)}))
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": model,
    }
    one = _get("model", "One model", _json("", _MODEL), 401, 404)
    chat = _post("chat", "Answers a conversation", _named(CHAT, model), _CHAT_ANSWER)
    completion = _post(
        "completion",
        "Goes on with texts",
        _named(COMPLETION, model),
        _COMPLETION_ANSWER,
    )
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "dcut-jax", "version": metadata.version("dcut-jax")},
        "paths": {
            "/v1/chat/completions": {"post": chat},
            "/v1/completions": {"post": completion},
            "/v1/models": {"get": _get("models", "What is served", models, 401)},
            "/v1/models/{name}": {"get": one | {"parameters": [name]}},
            "/health": {"get": _get("health", "Whether it works", status, 503)},
            "/ready": {"get": _get("ready", "Whether it takes requests", status, 503)},
            "/metrics": {"get": _get("metrics", "For Prometheus", plain)},
            "/live": {"get": _get("live", "What the page shows", _json("", _open({})))},
            "/": {"get": _get("page", "A page to look at", page)},
        },
    }
    if keys:
        scheme = {"type": "http", "scheme": "bearer"}
        found["components"] = {"securitySchemes": {"key": scheme}}
        for path, operations in found["paths"].items():
            if path.startswith("/v1/"):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
    return found


def _named(request: Schema, model: str) -> dict[str, Any]:
    """A request's schema with the one name that is served."""
    fields = request["properties"]
    named = {"model": {**fields["model"], "enum": [model]}}
    return {**request, "properties": {**fields, **named}}
