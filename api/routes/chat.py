"""POST /v1/chat/completions.

Owns the steps of a chat completion; what fields mean is in ``api.schemas.openai``.
"""

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope

from api.answers import whole_answer
from api.exchange import exchange_of, fresh_id
from api.routes.flow import require_chat_template, take_request, tokenised
from api.run import start
from api.schemas.openai import chat_ask, chat_decoder, chat_messages
from api.schemas.openai_answers import ChatFrames, Head, chat_answer
from api.services import Services
from api.sse import event_stream


def chat_route(services: Services) -> HTTPRouteHandler:
    """The handler over ``services``."""

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(scope: Scope) -> ASGIApp:
        exchange = exchange_of(scope)
        request, body_len = await take_request(services, exchange, chat_decoder)
        services.require_model(request.model)
        ask = chat_ask(request, services.card.vocab)
        messages = chat_messages(request.messages)
        require_chat_template(services)
        services.require_ready()
        prompt = await tokenised(
            services,
            exchange,
            body_len,
            lambda: services.codec.encode_chat(messages, tenant=exchange.tenant_name),
        )
        run = await start(services, exchange, ask, [prompt], stream=bool(request.stream))
        created = int(services.clock.now().timestamp())
        head = Head(fresh_id("chatcmpl-"), created, request.model, exchange.request_id)
        logprobs = bool(request.logprobs)
        if request.stream:
            frames = ChatFrames(
                head,
                services.codec,
                exchange.tally,
                logprobs=logprobs,
                usage=request.usage_wanted,
                num_choices=run.num_choices,
            )
            return event_stream(services, exchange, run, frames)
        choices = await run.completed()
        answer = chat_answer(head, services.codec, choices, exchange.tally, logprobs=logprobs)
        return whole_answer(msgspec.json.encode(answer))

    return chat_completions
