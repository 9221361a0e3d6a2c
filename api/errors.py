"""What can go wrong with a request, and how each failure looks to a client.

Owns the error tree, the two body shapes and the choice between them. Reads nothing of the request but its path and
headers; never shows a stack, a key or a prompt.

The tree (status; OpenAI type and code; Anthropic type)::

    ApiError
    ├── BadRequestError            400  invalid_request_error  invalid_value                invalid_request_error
    │   ├── MalformedBodyError     400  invalid_request_error  invalid_json                 invalid_request_error
    │   ├── UnknownFieldError      400  invalid_request_error  unknown_parameter            invalid_request_error
    │   ├── UnsupportedError       400  invalid_request_error  unsupported_parameter        invalid_request_error
    │   └── ContextLengthError     400  invalid_request_error  context_length_exceeded      invalid_request_error
    ├── AuthenticationError        401  invalid_request_error  invalid_api_key              authentication_error
    ├── PermissionDeniedError      403  invalid_request_error  insufficient_permissions     permission_error
    ├── NotFoundError              404  invalid_request_error  not_found                    not_found_error
    │   └── UnknownModelError      404  invalid_request_error  model_not_found              not_found_error
    ├── MethodNotAllowedError      405  invalid_request_error  method_not_allowed           invalid_request_error
    ├── BodyTimeoutError           408  invalid_request_error  body_timeout                 timeout_error
    ├── BodyTooLargeError          413  invalid_request_error  body_too_large               request_too_large
    ├── PathTooLongError           414  invalid_request_error  path_too_long                invalid_request_error
    ├── MediaTypeError             415  invalid_request_error  unsupported_media_type       invalid_request_error
    ├── RateLimitError             429  rate_limit_error       rate_limit_exceeded          rate_limit_error
    ├── OverloadedError            429  rate_limit_error       overloaded                   rate_limit_error
    ├── GenerationError            500  server_error           generation_failed            api_error
    ├── InternalError              500  server_error           internal_error               api_error
    ├── HandoffError               500  server_error           handoff_failed               api_error
    └── NotReadyError              503  server_error           not_ready                    overloaded_error

What this process or the engine says of its own failures may name files of the host. Clients get those names without the
folders (``without_folders``); the log has them whole.

503 stands where Anthropic's own service answers 529: the type is the same, and proxies know 503.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar

import msgspec

_QUOTED_CHARACTERS = 64
_FOLDERS = re.compile(r"[^\s'\"()\[\]<>,;]*/")


class Shape(StrEnum):
    """Whose wire format an answer has."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class ApiError(Exception):
    """A failure with a place in the tree above. The message is written for the client.

    ``param`` is the path of the field at fault, as in ``messages[0].content``; ``retry_after_s`` becomes the
    ``retry-after`` header.
    """

    status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    anthropic_type: ClassVar[str] = "api_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def headers(self) -> list[tuple[str, str]]:
        """Headers that belong to this failure."""
        if self.retry_after_s is None:
            return []
        return [("retry-after", str(max(1, -int(-self.retry_after_s // 1))))]


class BadRequestError(ApiError):
    """A value that this API does not take; ``param`` names it."""

    status = 400
    openai_type = anthropic_type = "invalid_request_error"
    code = "invalid_value"


class MalformedBodyError(BadRequestError):
    """The body is no JSON object in UTF-8."""

    code = "invalid_json"


class UnknownFieldError(BadRequestError):
    """A field that no documented parameter has."""

    code = "unknown_parameter"


class UnsupportedError(BadRequestError):
    """A documented parameter of the imitated API that this appliance cannot honour."""

    code = "unsupported_parameter"


class ContextLengthError(BadRequestError):
    """The prompt leaves no room for an answer; the message carries the prompt's length and the context's."""

    code = "context_length_exceeded"


class AuthenticationError(ApiError):
    """No key, a wrong key, or two keys that differ."""

    status = 401
    openai_type = "invalid_request_error"
    anthropic_type = "authentication_error"
    code = "invalid_api_key"

    def headers(self) -> list[tuple[str, str]]:
        """Adds the challenge that a 401 must carry."""
        return [("www-authenticate", "Bearer"), *super().headers()]


class PermissionDeniedError(ApiError):
    """A valid key without the scope that the route needs."""

    status = 403
    openai_type = "invalid_request_error"
    anthropic_type = "permission_error"
    code = "insufficient_permissions"


class NotFoundError(ApiError):
    """No such path."""

    status = 404
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"
    code = "not_found"


class UnknownModelError(NotFoundError):
    """No such model here."""

    code = "model_not_found"


class MethodNotAllowedError(ApiError):
    """The path exists, the method does not."""

    status = 405
    openai_type = anthropic_type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> list[tuple[str, str]]:
        """Adds the methods that the path does have."""
        return [("allow", self.allow), *super().headers()]


class BodyTimeoutError(ApiError):
    """The body did not arrive in time."""

    status = 408
    openai_type = "invalid_request_error"
    anthropic_type = "timeout_error"
    code = "body_timeout"


class BodyTooLargeError(ApiError):
    """The body passes the limit."""

    status = 413
    openai_type = "invalid_request_error"
    anthropic_type = "request_too_large"
    code = "body_too_large"


class PathTooLongError(ApiError):
    """The path passes the limit."""

    status = 414
    openai_type = anthropic_type = "invalid_request_error"
    code = "path_too_long"


class MediaTypeError(ApiError):
    """The body is not declared as JSON in UTF-8."""

    status = 415
    openai_type = anthropic_type = "invalid_request_error"
    code = "unsupported_media_type"


class RateLimitError(ApiError):
    """The key has used up its requests or tokens of this minute."""

    status = 429
    openai_type = anthropic_type = "rate_limit_error"
    code = "rate_limit_exceeded"


class OverloadedError(ApiError):
    """Too many requests wait already; carries the seconds after which to try again."""

    status = 429
    openai_type = anthropic_type = "rate_limit_error"
    code = "overloaded"


class GenerationError(ApiError):
    """The engine gave a choice up; the message is the engine's."""

    code = "generation_failed"


class InternalError(ApiError):
    """A fault of this process; the log has the cause under the request id."""


class HandoffError(ApiError):
    """The proxy in front named a file as the body that is not one of its own, or is gone."""

    code = "handoff_failed"


class NotReadyError(ApiError):
    """The engine is starting, draining or gone."""

    status = 503
    anthropic_type = "overloaded_error"
    code = "not_ready"

    def __init__(self, message: str, *, retry_after_s: float | None = 2.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


def quoted(value: object) -> str:
    """A client's value as an error message shows it: ``repr``, cut to a bounded length."""
    text = repr(value[: _QUOTED_CHARACTERS + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _QUOTED_CHARACTERS + 2 else f"{text[:_QUOTED_CHARACTERS]}..."


def without_folders(cause: str) -> str:
    """A cause for clients: of whatever may be a path or an address, only what follows the last slash."""
    return _FOLDERS.sub("", cause)


def shape_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Shape:
    """The shape a client expects: Anthropic's for a path only that API has or with an ``anthropic-version`` header.

    Args:
        path: the request's path.
        headers: its headers, names in lower case as ASGI gives them.
    """
    if path.startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in headers):
        return Shape.ANTHROPIC
    return Shape.OPENAI


class _OpenAIDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _OpenAIBody(msgspec.Struct):
    error: _OpenAIDetail
    request_id: str


class _AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class _AnthropicBody(msgspec.Struct):
    type: str
    error: _AnthropicDetail
    request_id: str


def error_body(error: ApiError, shape: Shape, request_id: str) -> bytes:
    """The JSON body of a failure, also the payload of an error event in a stream."""
    body: _AnthropicBody | _OpenAIBody
    message = without_folders(error.message) if error.status >= 500 else error.message
    if shape is Shape.ANTHROPIC:
        body = _AnthropicBody("error", _AnthropicDetail(error.anthropic_type, message), request_id)
    else:
        body = _OpenAIBody(_OpenAIDetail(message, error.openai_type, error.param, error.code), request_id)
    return msgspec.json.encode(body)
