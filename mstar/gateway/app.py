"""The routes of the HTTP API, and what every answer has in common: errors, keys, ids, patience."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from mstar.gateway.auth import Keys, request_id
from mstar.gateway.errors import ApiError, as_api_error, internal
from mstar.gateway.generate import GenerateRoutes, read_body
from mstar.gateway.health import Health
from mstar.gateway.metrics import CONTENT_TYPE, Metrics
from mstar.gateway.native import Question
from mstar.gateway.service import Service
from mstar.gateway.stream import Ticker
from mstar.validation.body import decode_body
from mstar.validation.errors import RequestInvalid

__all__ = ["Routes", "build_app"]

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_answer(error: ApiError) -> web.Response:
    """An error in OpenAI's shape, with the headers that belong to its status."""
    response = web.Response(body=error.body(), status=error.status, content_type="application/json")
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="mstar"'
    return response


class Routes:
    """Handlers of everything but generation; `questions` are those the native protocol shares."""

    def __init__(self, service: Service, health: Health) -> None:
        self._service = service
        self._health = health
        self._metrics = Metrics(service)
        self.questions: dict[str, Question] = {
            "models": self._ask_models,
            "status": self._ask_status,
            "ready": self._ask_ready,
            "tokenize": self._ask_tokenize,
            "detokenize": self._ask_detokenize,
        }

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 as long as the loop runs."""
        return json_answer({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: 200 while requests are taken, else 503 with the stage of each rank."""
        return json_answer(self._health.ready())

    async def status(self, request: web.Request) -> web.Response:
        """GET /status."""
        return json_answer(await self._health.status())

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_answer(self._health.models())

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/NAME."""
        try:
            name = self._service.intake.model(request.match_info["name"], required=True)
        except RequestInvalid as error:
            raise as_api_error(error) from error
        return json_answer(self._health.model(name))

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        body = await read_body(request, self._service.tuning.body_seconds)

        def work() -> bytes:
            return msgspec.json.encode(self._tokenized(decode_body(body)))

        answer = await self._service.work(len(body), work)
        return web.Response(body=answer, content_type="application/json")

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize."""
        body = await read_body(request, self._service.tuning.body_seconds)

        def work() -> bytes:
            return msgspec.json.encode({"prompt": self._service.intake.detokenize(body)})

        answer = await self._service.work(len(body), work)
        return web.Response(body=answer, content_type="application/json")

    def _tokenized(self, body: Mapping[str, Any]) -> dict[str, Any]:
        intake = self._service.intake
        tokens = intake.tokenize(body)
        return {"count": len(tokens), "max_model_len": intake.limits.window, "tokens": tokens.tolist()}

    async def _ask_models(self, body: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        return self._health.models()

    async def _ask_status(self, body: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        return await self._health.status()

    async def _ask_ready(self, body: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        return self._health.ready()

    async def _ask_tokenize(self, body: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        found: dict[str, Any] = await self._service.work(size, self._tokenized, body)
        return found

    async def _ask_detokenize(self, body: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        return {"prompt": await self._service.work(size, self._service.intake.detokenize, body)}


def build_app(
    service: Service, routes: Routes, ticker: Ticker, *, api_keys: tuple[str, ...], max_body_bytes: int
) -> web.Application:
    """The application with all routes."""
    keys = Keys(api_keys)

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count the answer while it is on its way: a drain waits for the last one."""
        service.responding += 1
        try:
            return await respond(request, handler)
        finally:
            service.responding -= 1

    async def respond(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every failure into OpenAI's shape; do not wait for ever for a client that does not read."""
        try:
            keys.check(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = error_answer(_http_error(request, error, max_body_bytes))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            service.refused(error.status)
        except ApiError as error:
            response = error_answer(error)
            service.refused(error.status)
        except asyncio.CancelledError:
            raise
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client is gone: nobody to answer, nothing to log
        except Exception:  # noqa: BLE001 - a handler's mistake is a 500, logged with its traceback
            _log.exception("%s %s failed", request.method, request.path)
            response = error_answer(internal("The server failed on this request."))
            service.refused(500)
        if not response.prepared:
            response.headers["x-request-id"] = request_id(request)
        await _deliver(request, response, service.tuning.slow_seconds)
        return response

    app = web.Application(middlewares=[answer], client_max_size=max_body_bytes)
    generate = GenerateRoutes(service, ticker)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions", generate.completion),
            web.get("/v1/models", routes.models),
            web.get("/v1/models/{name:.+}", routes.model),
            web.post("/tokenize", routes.tokenize),
            web.post("/detokenize", routes.detokenize),
            web.get("/health", routes.health),
            web.get("/ready", routes.ready),
            web.get("/status", routes.status),
            web.get("/metrics", routes.metrics),
        ]
    )
    return app


async def _deliver(request: web.Request, response: web.StreamResponse, seconds: float) -> None:
    transport = request.transport
    try:
        async with asyncio.timeout(seconds):
            await response.prepare(request)
            await response.write_eof()
    except ConnectionError:
        raise asyncio.CancelledError from None
    except TimeoutError:
        if transport is not None:
            transport.abort()


def _http_error(request: web.Request, error: web.HTTPException, max_body_bytes: int) -> ApiError:
    match error.status:
        case 404:
            return ApiError(404, f"There is no route {request.path[:200]!r}.", code="unknown_url")
        case 405:
            allowed = error.headers.get("Allow", "")
            message = f"{request.path} does not take {request.method}; allowed: {allowed}."
            return ApiError(405, message, code="method_not_allowed")
        case 413:
            message = f"The body is too large; at most {max_body_bytes} bytes are allowed."
            return ApiError(413, message, code="request_too_large")
        case status:
            return ApiError(status, error.reason, code=None)
