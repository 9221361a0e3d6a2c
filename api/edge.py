"""Edge: the outermost layer of the app; what holds for every request whatever its route.

Owns request ids, cross-origin headers, HEAD, the end of given-up exchanges and the one record a request. Reads path and
headers; never a body.
"""

import asyncio
from typing import cast

from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from api.answers import error_answer
from api.errors import PathTooLongError
from api.exchange import Exchange, attach_exchange
from api.ports import Observer
from api.settings import ApiSettings, Clock

OTHER_ROUTE = "other"
MODEL_ROUTE = "/v1/models/{id}"
ROUTES = frozenset(
    {
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/answers/forget",
        MODEL_ROUTE,
        "/health/live",
        "/health/ready",
        "/health",
        "/metrics",
    }
)
"""Templates of all paths there are; with ``OTHER_ROUTE`` the only values of ``RequestRecord.route``."""

_EXPOSED = (
    b"x-request-id, request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_ANY_HEADER = b"authorization, content-type, x-api-key, anthropic-version, x-request-id"


def route_label(path: str) -> str:
    """The route template of a path, a bounded set fit for metric labels."""
    path = "/" + "/".join(part for part in path.split("/") if part)
    if path in ROUTES:
        return path
    return MODEL_ROUTE if path.startswith("/v1/models/") else OTHER_ROUTE


def is_probe(route: str) -> bool:
    """Whether a route is asked by machines about this process and so stays out of the records."""
    return route.startswith("/health") or route == "/metrics"


class Edge:
    """ASGI wrapper around the app's own handler."""

    __slots__ = ("_app", "_clock", "_observer", "_settings")

    def __init__(self, app: ASGIApp, observer: Observer, settings: ApiSettings, clock: Clock) -> None:
        self._app = app
        self._observer = observer
        self._settings = settings
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request to its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = cast("HTTPScope", scope)
        route = route_label(scope["path"])
        exchange = Exchange(scope, receive, send, route=route, settings=self._settings, clock=self._clock)
        attach_exchange(scope, exchange)
        exchange.response_headers.extend(self._cross_origin(exchange))
        observed = not is_probe(route)
        if observed:
            self._observer.request_started(route)
        try:
            await self._answer(scope, exchange)
        except asyncio.CancelledError:
            if not exchange.given_up:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        finally:
            exchange.close()
            if observed:
                self._observer.request_finished(exchange.record())

    async def _answer(self, scope: HTTPScope, exchange: Exchange) -> None:
        bound = self._settings.max_path_bytes
        if len(scope["path"]) > bound:
            error = PathTooLongError(f"the path has {len(scope['path'])} characters; at most {bound} are taken")
            await error_answer(exchange, error)(scope, exchange.receive, exchange.send)
            return
        method = scope["method"]
        if method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None:
            await self._preflight(exchange)
            return
        if method == "HEAD":
            scope["method"] = "GET"
        await self._app(scope, exchange.receive, exchange.send)

    def _cross_origin(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        origin = exchange.header(b"origin")
        allowed = self._settings.cors_origins
        if not allowed:
            return []
        if "*" in allowed:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        if origin is None or origin.decode("latin-1") not in allowed:
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    async def _preflight(self, exchange: Exchange) -> None:
        headers: list[tuple[bytes, bytes]] = []
        if any(name == b"access-control-allow-origin" for name, _ in exchange.response_headers):
            headers = [
                (b"access-control-allow-methods", b"GET, POST, HEAD, OPTIONS"),
                (b"access-control-allow-headers", exchange.header(b"access-control-request-headers") or _ANY_HEADER),
                (b"access-control-max-age", b"600"),
            ]
        await exchange.send({"type": "http.response.start", "status": 204, "headers": headers})
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
