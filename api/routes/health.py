"""GET /health/live, /health/ready and /health: whether this process lives, whether it can take work, and a summary.

Owns no state; needs no key, shows nothing of any request. Live answers at once as long as the event loop turns.
"""

from collections.abc import Sequence

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope
from msgspec import Struct

from api.answers import whole_answer
from api.errors import without_folders
from api.services import Services

_RETRY = [("retry-after", "2")]


class Live(Struct):
    """Answer of ``/health/live``."""

    status: str = "live"


class Ready(Struct):
    """Answer of ``/health/ready``; ``reason`` says why not."""

    status: str
    reason: str


class Summary(Struct):
    """Answer of ``/health``: counts of sequences and pages, seconds since the engine's last step.

    ``cached_pages`` are free and still hold what a prompt may begin with; ``prefix_hit_rate`` is the share of prompt
    ids that were reused since the engine's start.
    """

    status: str
    reason: str
    model: str
    context: int
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    cached_pages: int
    prefix_hit_rate: float
    last_step_age_s: float


def health_routes(services: Services) -> Sequence[HTTPRouteHandler]:
    """The handlers over ``services``."""

    @get("/health/live")
    async def live(scope: Scope) -> ASGIApp:
        del scope
        return whole_answer(msgspec.json.encode(Live()))

    @get("/health/ready")
    async def ready(scope: Scope) -> ASGIApp:
        del scope
        return _with_status(_ready(services))

    @get("/health")
    async def health(scope: Scope) -> ASGIApp:
        del scope
        state, engine = _ready(services), services.generator.status()
        return _with_status(
            Summary(
                state.status,
                state.reason,
                services.card.name,
                services.card.context,
                engine.running,
                engine.waiting,
                engine.free_pages,
                engine.total_pages,
                engine.cached_pages,
                round(engine.hit_rate, 4),
                engine.last_step_age_s,
            )
        )

    return live, ready, health


def _ready(services: Services) -> Ready:
    if services.settings.draining():
        return Ready("draining", "this process is shutting down")
    status = services.generator.status()
    return Ready(status.state, without_folders(status.reason))


def _with_status(body: Ready | Summary) -> ASGIApp:
    encoded = msgspec.json.encode(body)
    return whole_answer(encoded) if body.status == "ready" else whole_answer(encoded, status=503, headers=_RETRY)
