"""The HTTP application: routes, limits, and answers that end when nobody listens."""

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcut_jax.serve.openapi import document
from dcut_jax.serve.protocol import Answer, Ask, Kind, Served, parse_json, read_ask
from dcut_jax.serve.scheduler import End, Job, Limits, News, Refused, Scheduler
from dcut_jax.serve.schema import BadField

_JSON = "application/json"
_THROWN_AWAY = 16 << 20  # bytes of a body that is too long


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


_NO_RETRY = {"x-should-retry": "false"}  # clients of OpenAI's heed it


def _ended_badly(end: End) -> ApiError | None:
    """The error that an end is; None where the text is whole."""
    match end:
        case "failed":
            return ApiError(
                500,
                "The model gave no finite scores for the next token of this text; no "
                "other request is concerned. Change the prompt, or report it.",
                "not_finite",
                headers=_NO_RETRY,
            )
        case "broken":
            said = "The engine failed; the server has to be restarted."
            return ApiError(500, said, "engine_failed")
        case "late":
            return ApiError(
                408, "deadline_ms has passed.", "deadline_exceeded", headers=_NO_RETRY
            )
        case "dropped":
            return _unavailable("The server is shutting down.", 10)
        case "cancelled":
            return ApiError(499, "The request was called off.", "cancelled")
    return None


def _unavailable(message: str, retry_s: int) -> ApiError:
    headers = {"Retry-After": str(retry_s)}
    return ApiError(503, message, "unavailable", headers=headers)


@dataclass
class Server:
    """What routes share.

    Attributes:
      api_keys: of which a request has to bring one; none means that anyone may ask.
      body_s, write_s: time that a client has for sending its request, and for taking
        the next piece of an answer.
    """

    served: Served
    scheduler: Scheduler
    limits: Limits
    api_keys: Sequence[str] = ()
    body_s: float = 30.0
    write_s: float = 60.0
    busy: Counter[str] = field(default_factory=Counter)

    # -- asking ---------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._answer("chat", request)

    async def completion(self, request: Request) -> Response:
        return await self._answer("completion", request)

    async def _answer(self, kind: Kind, request: Request) -> Response:
        arrived = time.monotonic()
        client = self._client(request)
        self._enter(client)
        try:
            body = await self._body(request)
            # Parsing a long prompt takes a while, and others wait in this loop.
            ask = await asyncio.to_thread(self._understand, kind, body)
            news: asyncio.Queue[tuple[Job, News]] = asyncio.Queue()
            deadline = arrived + ask.wait_s
            jobs = [Job(r, news, deadline, arrived) for r in ask.requests]
            self.scheduler.submit(jobs)
        except Refused as error:
            self.leave(client)
            raise _unavailable(str(error), error.retry_s) from error
        except BaseException:
            self.leave(client)
            raise
        return _Reply(self, client, ask, jobs, news)

    def _enter(self, client: str) -> None:
        """Counts a request before any of it is read, so that memory is bounded.

        Raises:
          ApiError: this client, or all of them, have as many as they may.
        """
        if self.busy[client] >= self.limits.per_client:
            raise ApiError(
                429,
                f"{self.busy[client]} requests of this client are under way, which is "
                f"as many as it may have; wait for one to end.",
                "rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        most = self.limits.queue + self.scheduler.engine.config.slots
        if self.busy.total() >= most:
            retry_s = self.scheduler.watch.wait_s(self.scheduler.waiting)
            raise _unavailable(f"{most} requests are under way, no more fit.", retry_s)
        self.busy[client] += 1

    def leave(self, client: str) -> None:
        """A request of this client has ended."""
        self.busy[client] -= 1
        if self.busy[client] <= 0:
            del self.busy[client]  # or there would be one for every address ever seen

    def _understand(self, kind: Kind, body: bytes) -> Ask:
        try:
            ask = read_ask(kind, parse_json(body), self.served)
        except BadField as error:
            status = 404 if error.code == "model_not_found" else 400
            raise ApiError(status, str(error), error.code, param=error.param) from error
        try:
            for request in ask.requests:
                self.scheduler.engine.check(request)
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_value") from error
        return ask

    def _client(self, request: Request) -> str:
        """Who asks: a key, or without keys an address.

        Raises:
          ApiError: keys are wanted, and this is none.
        """
        if not self.api_keys:
            return request.client.host if request.client else ""
        header = request.headers.get("authorization", "").encode("latin-1")
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer" or not any(
            hmac.compare_digest(given.strip(), key.encode()) for key in self.api_keys
        ):
            raise ApiError(
                401,
                "Expected a key of this server as `Authorization: Bearer KEY`.",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given.strip().decode(errors="replace")

    async def _body(self, request: Request) -> bytes:
        """The body, as far as it may be long.

        Raises:
          ApiError: it is too long, too slow, or not said to be JSON.
        """
        # A page of another origin can send a form to this address, but no JSON.
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != _JSON:
            raise ApiError(
                415, f"Expected Content-Type: {_JSON}.", "unsupported_media_type"
            )
        most = self.limits.body_bytes
        too_long = ApiError(
            413,
            f"Expected a body of at most {most} bytes.",
            "request_too_large",
            headers={"Connection": "close"},
        )
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self.body_s):
                async for part in request.stream():
                    size += len(part)
                    if size <= most:
                        body += part
                    # A client that still sends when the connection ends sees no answer;
                    # so what is too long is read, and thrown away, up to a point.
                    elif size > most + _THROWN_AWAY:
                        raise too_long
        except TimeoutError as error:
            raise ApiError(408, "The body took too long.", "body_timeout") from error
        if size > most:
            raise too_long
        return bytes(body)

    async def drain(self, patience_s: float) -> None:
        """Takes nothing in, and waits until all answers were taken, or so long."""
        end = time.monotonic() + patience_s
        await self.scheduler.drain(patience_s)
        while self.busy and time.monotonic() < end:
            await asyncio.sleep(0.05)

    # -- looking --------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        html = (
            resources.files("dcut_jax.serve").joinpath("page.html").read_text("utf-8")
        )
        policy = "default-src 'none'; script-src 'unsafe-inline'; connect-src 'self'; "
        policy += "style-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    async def live(self, request: Request) -> Response:
        failure = self.scheduler.failure
        about = {"model": self.served.name, "keys": bool(self.api_keys)}
        about["failed"] = None if failure is None else str(failure)
        return JSONResponse(self.scheduler.watch.snapshot | about)

    async def metrics(self, request: Request) -> Response:
        text = generate_latest(self.scheduler.watch.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: Request) -> Response:
        failure = self.scheduler.failure
        if failure is not None:
            raise _unavailable(f"The engine failed: {failure}", 60)
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self.scheduler.draining:
            raise _unavailable("The server is shutting down.", 10)
        return JSONResponse({"status": "ready"})

    async def models(self, request: Request) -> Response:
        self._client(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._client(request)
        name = request.path_params["name"]
        if name != self.served.name:
            raise ApiError(
                404,
                f"The model '{ascii(name)[1:-1]}' does not exist.",
                "model_not_found",
            )
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "dcut-jax",
            "max_model_len": self.served.max_length,
        }

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document(self.served.name, bool(self.api_keys)))


class _Reply(Response):
    """The answer to one request, whole or in pieces.

    It ends when the client does: jobs that nobody waits for are called off. The status
    is sent with the first token, so that what fails before it has a status of its own.
    """

    def __init__(
        self,
        server: Server,
        client: str,
        ask: Ask,
        jobs: Sequence[Job],
        news: "asyncio.Queue[tuple[Job, News]]",
    ) -> None:
        self.server = server
        self.client = client
        self.ask = ask
        self.jobs = jobs
        self.news = news
        self.answer = Answer(ask, server.served)
        self.choice = dict(zip(jobs, self.answer.choices, strict=True))
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._work(scope, receive, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except (TimeoutError, OSError):
            pass  # the client takes nothing any more
        finally:
            for job in self.jobs:
                if not job.ended:
                    self.server.scheduler.cancel(job)
            self.server.leave(self.client)
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = self._streamed() if self.ask.stream else self._whole()
        try:
            first = await anext(pieces)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if not self.ask.stream:
            # As for a stream: a client that takes nothing must not hold it for ever.
            async with asyncio.timeout(self.server.write_s):
                return await JSONResponse(first)(scope, receive, send)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers += [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._send(send, start)
        await self._event(send, json.dumps(first))
        try:
            async for piece in pieces:
                await self._event(send, json.dumps(piece))
            await self._event(send, "[DONE]")
        except ApiError as error:
            await self._event(send, json.dumps(error.body))
        await self._send(send, {"type": "http.response.body", "body": b""})

    async def _event(self, send: Send, data: str) -> None:
        body = f"data: {data}\n\n".encode()
        message = {"type": "http.response.body", "body": body, "more_body": True}
        await self._send(send, message)

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self.server.write_s):
            await send(message)

    async def _next(self) -> tuple[Job, News]:
        """The next news.

        Raises:
          ApiError: they are bad.
        """
        job, news = await self.news.get()
        error = _ended_badly(news.end) if news.end is not None else None
        if error is not None:
            raise error
        return job, news

    @property
    def _usage(self) -> dict[str, Any]:
        done = [job.completion for job in self.jobs]
        return self.answer.usage(sum(c.verified for c in done if c is not None))

    async def _whole(self) -> AsyncIterator[dict[str, Any]]:
        while any(c.finish is None for c in self.answer.choices):
            job, news = await self._next()
            self.choice[job].take(news)
        yield self.answer.whole(self._usage)

    async def _streamed(self) -> AsyncIterator[dict[str, Any]]:
        started = False
        while any(c.finish is None for c in self.answer.choices):
            job, news = await self._next()
            if not started:
                started = True
                for piece in self.answer.first():
                    yield piece
            choice = self.choice[job]
            some = self.answer.piece(choice, choice.take(news))
            if some is not None:
                yield some
        if self.ask.include_usage:
            yield self.answer.last(self._usage)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Counted:
    """Counts responses by route and status."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self.app = app
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        def count(status: int) -> None:
            nonlocal started
            started = True
            self.count(getattr(scope.get("route"), "path", "other"), status)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except Exception:
            if not started:
                count(500)  # which whoever is around this will send
            raise


def make_app(server: Server) -> Starlette:
    """The application; its start and end are those of the scheduler's thread."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.scheduler.start()
        yield
        await server.scheduler.stop()

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = ApiError(
            error.status_code,
            f"{error.detail}: {request.method} {ascii(request.url.path)[1:-1]}",
            "not_found" if error.status_code == 404 else "invalid_request",
            headers=error.headers,
        )
        return found.response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody sees it

    def count(path: str, status: int) -> None:
        server.scheduler.watch.answers.labels(path, status).inc()

    get = ["GET"]
    routes = [
        Route("/", server.page, methods=get),
        Route("/live", server.live, methods=get),
        Route("/health", server.health, methods=get),
        Route("/ready", server.ready, methods=get),
        Route("/metrics", server.metrics, methods=get),
        Route("/openapi.json", server.openapi, methods=get),
        Route("/v1/models", server.models, methods=get),
        Route("/v1/models/{name:path}", server.model, methods=get),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completion, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            ApiError: api_error,
            HTTPException: http_error,
            ClientDisconnect: gone,
        },
    )
    app.add_middleware(_Counted, count=count)
    return app
