"""Whole answers: a status, headers and one JSON body.

Owns their framing on the wire. Streams are made in ``api.sse``.
"""

from litestar.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, error_body
from api.exchange import Exchange


def whole_answer(
    body: bytes,
    *,
    status: int = 200,
    media_type: str = "application/json",
    headers: list[tuple[str, str]] | None = None,
) -> ASGIApp:
    """An ASGI app that sends ``body`` and ends."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", media_type.encode()),
                    (b"content-length", str(len(body)).encode()),
                    *((name.encode(), value.encode()) for name, value in headers or ()),
                ],
            }
        )
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return respond


def error_answer(exchange: Exchange, error: ApiError) -> ASGIApp:
    """A failure in the client's shape; the exchange's record takes its code."""
    exchange.tally.error = error.code
    body = error_body(error, exchange.shape, exchange.request_id)
    return whole_answer(body, status=error.status, headers=error.headers())
