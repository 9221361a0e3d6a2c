"""The Litestar app: routes, the mapping of failures to answers, and the edge around both.

Owns the assembly only. ``create_app`` has no side effects and keeps nothing global, so several apps can live in one
process. The app is made for an ASGI server that reports ``http.disconnect`` to a waiting ``receive`` and that blocks
``send`` while the client does not read.
"""

import logging
from typing import Any

from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException

from api.edge import ROUTES, Edge
from api.errors import (
    ApiError,
    BadRequestError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    error_body,
    quoted,
)
from api.exchange import exchange_of
from api.ports import Answers, Generator, KeyRing, ModelCard, Observer, Quota, TextCodec
from api.routes.answers import answers_route
from api.routes.chat import chat_route
from api.routes.completions import completions_route
from api.routes.health import health_routes
from api.routes.messages import messages_routes
from api.routes.metrics import metrics_route
from api.routes.models import models_routes
from api.services import Services
from api.settings import ApiSettings, Clock

__all__ = ["ROUTES", "create_app"]

_log = logging.getLogger(__name__)

_AnyRequest = Request[Any, Any, Any]


def create_app(
    generator: Generator,
    codec: TextCodec,
    card: ModelCard,
    keys: KeyRing,
    quota: Quota,
    observer: Observer,
    settings: ApiSettings,
    clock: Clock | None = None,
    answers: Answers | None = None,
) -> Litestar:
    """An app over the given seams; see ``api.ports`` for what each must do.

    Args:
        generator: runs requests.
        codec: text to ids and back.
        card: the served model.
        keys: who may call.
        quota: how much each key may use.
        observer: is told of every request, once at its start and once at its end, probes aside.
        settings: bounds and switches.
        clock: the clocks to read; the machine's by default.
        answers: those that are kept, if any.
    """
    clock = clock or Clock()
    services = Services(generator, codec, card, keys, quota, observer, settings, clock, answers)
    app = Litestar(
        route_handlers=[
            *messages_routes(services),
            chat_route(services),
            completions_route(services),
            *models_routes(services),
            answers_route(services),
            *health_routes(services),
            metrics_route(services),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _unrouted, Exception: _failed},
        openapi_config=None,
        logging_config=None,
        debug=False,
    )
    app.asgi_handler = Edge(app.asgi_handler, observer, settings, clock)
    return app


def _refused(request: _AnyRequest, error: ApiError) -> Response[bytes]:
    exchange = exchange_of(request.scope)
    exchange.tally.error = error.code
    return Response(
        error_body(error, exchange.shape, exchange.request_id),
        status_code=error.status,
        headers=dict(error.headers()),
        media_type="application/json",
    )


def _unrouted(request: _AnyRequest, error: HTTPException) -> Response[bytes]:
    path = quoted(request.scope["path"])
    if error.status_code == 405:
        allow = (error.headers or {}).get("allow", "")
        return _refused(request, MethodNotAllowedError(f"{path} does not take this method; use {allow}", allow=allow))
    if error.status_code == 404:
        return _refused(request, NotFoundError(f"there is nothing at {path}; see the documentation for the paths"))
    if error.status_code < 500:
        return _refused(request, BadRequestError(f"the request was refused: {error.detail}"))
    return _failed(request, error)


def _failed(request: _AnyRequest, error: Exception) -> Response[bytes]:
    exchange = exchange_of(request.scope)
    _log.error("request failed", exc_info=error, extra={"request_id": exchange.request_id})
    return _refused(request, InternalError("internal error; the server's log has the cause under this request id"))
