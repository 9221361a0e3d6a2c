"""POST /v1/answers/forget: what the caller's tenant has asked is not given again from what is kept.

Owns that one path. It takes any key of the tenant and no body; where no answers are kept there is nothing to do.
"""

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope
from msgspec import Struct

from api.answers import whole_answer
from api.auth import authenticate
from api.exchange import exchange_of
from api.services import Services


class Forgotten(Struct):
    """The answer; ``kept`` says whether answers are kept here at all."""

    kept: bool
    object: str = "answers.forgotten"


def answers_route(services: Services) -> HTTPRouteHandler:
    """The handler over ``services``."""

    @post("/v1/answers/forget", status_code=200)
    async def forget(scope: Scope) -> ASGIApp:
        exchange = exchange_of(scope)
        authenticate(exchange, services.keys)
        if services.answers is not None:
            services.answers.forget(exchange.tenant_name)
        return whole_answer(msgspec.json.encode(Forgotten(services.answers is not None)))

    return forget
