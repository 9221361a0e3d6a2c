"""POST /v1/completions.

Owns the steps of a text completion; what fields mean is in ``api.schemas.openai``. The text of special tokens in a text
prompt is parsed as those tokens, unlike in chat messages.
"""

from collections.abc import Sequence

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope

from api.answers import whole_answer
from api.errors import BadRequestError
from api.exchange import exchange_of, fresh_id
from api.ports import TextCodec
from api.routes.flow import take_request, tokenised
from api.run import start
from api.schemas.openai import completion_ask, completion_decoder, prompts_of
from api.schemas.openai_answers import CompletionFrames, Head, completion_answer
from api.services import Services
from api.sse import event_stream


def completions_route(services: Services) -> HTTPRouteHandler:
    """The handler over ``services``."""

    @post("/v1/completions", status_code=200)
    async def completions(scope: Scope) -> ASGIApp:
        exchange = exchange_of(scope)
        request, body_len = await take_request(services, exchange, completion_decoder)
        services.require_model(request.model)
        ask = completion_ask(request, services.card.vocab)
        given = prompts_of(request, services.card.vocab, services.settings.max_choices)
        services.require_ready()
        prompts = await tokenised(
            services, exchange, body_len, lambda: _prompts(services.codec, given, exchange.tenant_name)
        )
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise BadRequestError(f"prompt[{index}] gives no token; send some text", param="prompt")
        run = await start(services, exchange, ask, prompts, stream=bool(request.stream))
        echoes = [
            _text(services.codec, prompt) if request.echo else "" for prompt in given for _ in range(ask.num_choices)
        ]
        created = int(services.clock.now().timestamp())
        head = Head(fresh_id("cmpl-"), created, request.model, exchange.request_id)
        logprobs = request.logprobs is not None
        if request.stream:
            frames = CompletionFrames(
                head, services.codec, exchange.tally, logprobs=logprobs, usage=request.usage_wanted, echoes=echoes
            )
            return event_stream(services, exchange, run, frames)
        choices = await run.completed()
        answer = completion_answer(head, services.codec, choices, exchange.tally, logprobs=logprobs, echoes=echoes)
        return whole_answer(msgspec.json.encode(answer))

    return completions


def _prompts(codec: TextCodec, given: Sequence[str | Sequence[int]], tenant: str) -> list[Sequence[int]]:
    """The ids of each prompt; some are given as ids."""
    return [
        codec.encode(prompt, parse_special=True, tenant=tenant) if isinstance(prompt, str) else prompt
        for prompt in given
    ]


def _text(codec: TextCodec, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    decoder = codec.decoder()
    return "".join(decoder.push(token_id) for token_id in prompt) + decoder.flush()
