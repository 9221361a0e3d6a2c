"""The first steps that all generating routes share: key, request count, body, model, readiness, prompt.

Owns their order: a request without a valid key learns nothing else, a request over its limit is not parsed.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from api import limits
from api.auth import authenticate
from api.body import decode, read_body
from api.errors import BadRequestError
from api.exchange import Exchange
from api.ports import ChatTemplateError
from api.services import Services

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


async def take_request(
    services: Services, exchange: Exchange, decoder: msgspec.json.Decoder[_Request]
) -> tuple[_Request, int]:
    """Authenticate, count, read and decode a request; returns it with the size of its body in bytes.

    Raises:
        ApiError: any of these steps refused it.
    """
    tenant = authenticate(exchange, services.keys)
    limits.take(services, exchange, tenant, requests=1)
    with exchange.phase("receive"):
        body = await read_body(exchange, services.settings)
        return decode(decoder, body), len(body)


async def tokenised(services: Services, exchange: Exchange, body_len: int, encode: Callable[[], _Result]) -> _Result:
    """The result of a CPU-bound ``encode``, in a thread when the body was large.

    Raises:
        BadRequestError: the chat template refused the conversation.
    """
    try:
        with exchange.phase("tokenise"):
            if body_len < services.settings.offload_bytes:
                return encode()
            return await asyncio.to_thread(encode)
    except ChatTemplateError as error:
        raise BadRequestError(f"messages: {error}", param="messages") from error


def require_chat_template(services: Services) -> None:
    """Refuse conversations for a model that has no chat template.

    Raises:
        BadRequestError: it has none.
    """
    if not services.card.has_chat_template:
        raise BadRequestError("this model has no chat template; use /v1/completions", param="messages")
