"""GET /v1/models and /v1/models/{id}, in the shape of the API that asks.

Owns the two model descriptions. The served model is listed under its name and each of its aliases.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope
from msgspec import Struct

from api.answers import whole_answer
from api.auth import authenticate
from api.errors import Shape
from api.exchange import exchange_of
from api.ports import ModelCard
from api.services import Services


class OpenAIModel(Struct):
    """A model as the OpenAI API describes it; ``max_model_len`` is an extension, in tokens."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "zccp"


class OpenAIModels(Struct):
    """The list of models."""

    data: list[OpenAIModel]
    object: str = "list"


class AnthropicModel(Struct):
    """A model as the Anthropic API describes it."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    type: str = "model"
    lifecycle: str = "active"


class AnthropicModels(Struct):
    """The list of models, on one page."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


def models_routes(services: Services) -> Sequence[HTTPRouteHandler]:
    """The handlers over ``services``."""
    card = services.card
    names = (card.name, *card.aliases)

    @get("/v1/models")
    async def models(scope: Scope) -> ASGIApp:
        exchange = exchange_of(scope)
        authenticate(exchange, services.keys)
        if exchange.shape is Shape.ANTHROPIC:
            page = AnthropicModels([_anthropic(card, name) for name in names], names[0], names[-1])
            return whole_answer(msgspec.json.encode(page))
        return whole_answer(msgspec.json.encode(OpenAIModels([_openai(card, name) for name in names])))

    @get("/v1/models/{model_id:path}")
    async def model(scope: Scope) -> ASGIApp:
        exchange = exchange_of(scope)
        authenticate(exchange, services.keys)
        name = str(scope["path_params"]["model_id"]).removeprefix("/")
        services.require_model(name)
        described = _anthropic(card, name) if exchange.shape is Shape.ANTHROPIC else _openai(card, name)
        return whole_answer(msgspec.json.encode(described))

    return models, model


def _openai(card: ModelCard, name: str) -> OpenAIModel:
    return OpenAIModel(name, card.created, card.context)


def _anthropic(card: ModelCard, name: str) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(name, card.name, created, card.context - 1, card.context - 1)
