"""Reading a request's body: declared type, size and time bounds, then one decode.

Owns the checks that need no knowledge of the endpoint. Every refusal comes before more than the bound is held.
"""

import asyncio
import codecs
import re
from mmap import mmap
from typing import TypeVar

import msgspec

from api.errors import (
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedBodyError,
    MediaTypeError,
    UnknownFieldError,
    quoted,
)
from api.exchange import Exchange
from api.settings import ApiSettings

Body = bytes | bytearray | mmap
"""A body as it came: from a socket, or as the mapping of a file (``api.body_file``)."""

_Request = TypeVar("_Request")
_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*?)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*?)`)?$", re.DOTALL)
_WRONG_VALUE = re.compile(r"(.*?) - at `\$\.?(.*?)`$", re.DOTALL)
_DECODED_BYTES = 1 << 16
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


async def read_body(exchange: Exchange, settings: ApiSettings) -> Body:
    """The whole body; from here on the exchange watches for the client leaving.

    Raises:
        MediaTypeError: the declared type, charset or content coding is not plain JSON in UTF-8.
        BodyTooLargeError: it passes ``max_body_bytes``, by its declared length or while it arrives.
        BodyTimeoutError: it did not arrive within ``body_timeout_s``.
        MalformedBodyError: it ended before its declared end; the server says no more than that the client is done, so a
            client that has left gets the same answer as one whose chunks cannot be read.
    """
    _check_media_type(exchange)
    declared = exchange.header(b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > settings.max_body_bytes:
        raise too_large(int(declared), settings)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _collect(exchange, settings)
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {settings.body_timeout_s} s; send it again") from error
    exchange.watch()
    return body


async def _collect(exchange: Exchange, settings: ApiSettings) -> Body:
    held: Body = b""
    while True:
        message = await exchange.receive()
        if message["type"] != "http.request":
            raise MalformedBodyError(f"the body broke off or is badly framed after {len(held)} bytes; send all of it")
        part = message.get("body", b"")
        more = message.get("more_body", False)
        if len(held) + len(part) > settings.max_body_bytes:
            raise too_large(len(held) + len(part), settings)
        if not held:
            held = bytearray(part) if more else part
        elif isinstance(held, bytearray):
            held += part
        if not more:
            return held


def decode(decoder: msgspec.json.Decoder[_Request], body: Body) -> _Request:
    """A body as the endpoint's request struct.

    Raises:
        MalformedBodyError: no JSON object in UTF-8 (NaN, lone surrogates and too deep nesting included).
        UnknownFieldError: a field that the struct does not have; named with its path.
        BadRequestError: a field is missing or has a wrong type; named with its path.
    """
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except msgspec.DecodeError as error:
        raise MalformedBodyError(f"the body is no valid JSON: {_malformed(str(error), body)}") from None
    except RecursionError:
        raise MalformedBodyError("the body is nested too deeply; flatten it") from None
    _check_encoding(body)
    return request


def _check_encoding(body: Body) -> None:
    """Refuse bytes that are no UTF-8 where the JSON decoder does not look: in values that nothing reads."""
    if not isinstance(body, mmap) and body.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    with memoryview(body) as view:
        for start in range(0, len(view), _DECODED_BYTES):
            end = start + _DECODED_BYTES
            try:
                decoder.decode(view[start:end], end >= len(view))
            except UnicodeDecodeError:
                raise MalformedBodyError(
                    f"the body is no valid JSON: bytes {start} to {min(end, len(view)) - 1} are no UTF-8"
                ) from None


def _check_media_type(exchange: Exchange) -> None:
    coding = exchange.header(b"content-encoding")
    if coding is not None and coding.lower() not in (b"", b"identity"):
        raise MediaTypeError(
            f"content-encoding {quoted(coding.decode('latin-1'))} is not taken; send the body as it is"
        )
    declared = (exchange.header(b"content-type") or b"").decode("latin-1").strip().lower()
    if not declared:
        return
    kind, *parameters = (part.strip() for part in declared.split(";"))
    if not _JSON_TYPE.fullmatch(kind):
        raise MediaTypeError(f"content-type {quoted(kind)} is not taken; send application/json")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise MediaTypeError(f"charset {quoted(value.strip())} is not taken; send the body in utf-8")


def too_large(size: int, settings: ApiSettings) -> BodyTooLargeError:
    """The refusal of a body of ``size`` bytes or more."""
    return BodyTooLargeError(
        f"the body has {size} bytes or more; at most {settings.max_body_bytes} are taken: send less, or raise"
        " server.max_body_mb"
    )


def _field_error(text: str) -> BadRequestError:
    if match := _UNKNOWN_FIELD.match(text):
        path = _joined(match[2], match[1])
        return UnknownFieldError(f"{path}: no such field; see the documentation for those there are", param=path)
    if match := _MISSING_FIELD.match(text):
        path = _joined(match[2], match[1])
        return BadRequestError(f"{path}: the field is required", param=path)
    if match := _WRONG_VALUE.match(text):
        path = _cut(match[2].removesuffix("[...]"))
        return BadRequestError(f"{path}: {match[1]}", param=path)
    return BadRequestError(f"the body must be a JSON object: {text}")


def _joined(path: str | None, name: str) -> str:
    name = _cut(name)
    return f"{_cut(path)}.{name}" if path else name


def _cut(text: str) -> str:
    return text if len(text) <= 128 else f"{text[:128]}..."


def _malformed(text: str, body: Body) -> str:
    at = lone_surrogate(body)
    if at is not None:
        return f"a lone surrogate escape at byte {at}; send both halves of the pair, or the character itself"
    return text


def lone_surrogate(body: Body) -> int | None:
    r"""Byte at which the first ``\uD800``-``\uDFFF`` escape without its other half stands; None when there is none."""
    expected_at, high_at = -1, -1
    for match in _ESCAPE.finditer(body):
        code = int(match[1], 16) if match[1] else 0
        if high_at >= 0 and not (match.start() == expected_at and 0xDC00 <= code <= 0xDFFF):
            return high_at
        if high_at >= 0:
            high_at = -1
        elif 0xDC00 <= code <= 0xDFFF:
            return match.start()
        elif 0xD800 <= code <= 0xDBFF:
            high_at, expected_at = match.start(), match.end()
    return high_at if high_at >= 0 else None
