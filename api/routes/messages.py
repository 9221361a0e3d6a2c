"""POST /v1/messages and /v1/messages/count_tokens.

Owns the steps of an Anthropic message; what fields mean is in ``api.schemas.anthropic``.
"""

from collections.abc import Sequence

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope

from api.answers import whole_answer
from api.exchange import Exchange, exchange_of, fresh_id
from api.routes.flow import require_chat_template, take_request, tokenised
from api.run import start
from api.schemas.anthropic import (
    CountRequest,
    conversation_of,
    count_decoder,
    messages_ask,
    messages_decoder,
)
from api.schemas.anthropic_answers import MessageFrames, TokenCount, message_answer
from api.services import Services
from api.sse import event_stream


def messages_routes(services: Services) -> Sequence[HTTPRouteHandler]:
    """The handlers over ``services``."""

    @post("/v1/messages", status_code=200)
    async def messages(scope: Scope) -> ASGIApp:
        exchange = exchange_of(scope)
        request, body_len = await take_request(services, exchange, messages_decoder)
        services.require_model(request.model)
        ask = messages_ask(request, services.card.vocab)
        prompt = await _prompt(services, exchange, request, body_len, ready=True)
        run = await start(services, exchange, ask, [prompt], stream=bool(request.stream))
        message_id = fresh_id("msg_")
        if request.stream:
            frames = MessageFrames(message_id, request.model, exchange.request_id, exchange.tally)
            return event_stream(services, exchange, run, frames)
        (choice,) = await run.completed()
        return whole_answer(msgspec.json.encode(message_answer(message_id, request.model, choice, exchange.tally)))

    @post("/v1/messages/count_tokens", status_code=200)
    async def count_tokens(scope: Scope) -> ASGIApp:
        exchange = exchange_of(scope)
        request, body_len = await take_request(services, exchange, count_decoder)
        services.require_model(request.model)
        prompt = await _prompt(services, exchange, request, body_len, ready=False)
        return whole_answer(msgspec.json.encode(TokenCount(len(prompt))))

    return messages, count_tokens


async def _prompt(
    services: Services, exchange: Exchange, request: CountRequest, body_len: int, *, ready: bool
) -> Sequence[int]:
    conversation = conversation_of(request)
    require_chat_template(services)
    if ready:
        services.require_ready()
    return await tokenised(
        services,
        exchange,
        body_len,
        lambda: services.codec.encode_chat(
            conversation.messages, continue_last=conversation.continue_last, tenant=exchange.tenant_name
        ),
    )
