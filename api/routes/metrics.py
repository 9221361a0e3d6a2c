"""GET /metrics: the observer's exposition; needs an admin key where keys are needed at all."""

from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope

from api.answers import whole_answer
from api.auth import require_admin
from api.exchange import exchange_of
from api.services import Services


def metrics_route(services: Services) -> HTTPRouteHandler:
    """The handler over ``services``."""

    @get("/metrics")
    async def metrics(scope: Scope) -> ASGIApp:
        require_admin(exchange_of(scope), services.keys)
        media_type, body = services.observer.exposition()
        return whole_answer(body, media_type=media_type)

    return metrics
