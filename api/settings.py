"""What the HTTP layer can be told, and the clocks it reads.

Owns the settings' meaning and bounds. Reads no file and no environment: the process that builds the app fills them in.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct


def _never() -> bool:
    return False


def _now() -> datetime:
    return datetime.now(UTC)


class Clock(Struct, frozen=True):
    """The two clocks of this layer: one for durations in seconds, one for dates that clients see."""

    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = _now


class ApiSettings(Struct, frozen=True, kw_only=True):
    """Bounds and switches of the HTTP layer.

    - ``max_body_bytes`` bounds one request's body, ``body_timeout_s`` the time it may take to arrive.
    - ``keepalive_s`` is the longest silence in a stream before a ping is written.
    - ``write_timeout_s`` is how long one write may wait for a client that does not read; then the answer is dropped and
      its generation cancelled. Until then at most what the kernel's socket buffers hold is kept for it.
    - Bodies above ``offload_bytes`` are tokenised in a thread.
    - ``max_choices`` bounds prompts times ``n`` of one request.
    - ``cors_origins`` lists the browser origins that may call; ``*`` allows any, none is the default.
    - ``draining`` says whether the process has been told to stop: ready turns 503, new requests are refused.
    - ``leaving`` says whether another process takes the connections from now on: requests are answered as ever, and
      answers over HTTP/1 tell the client to open a new connection for the next one.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 60.0
    keepalive_s: float = 15.0
    write_timeout_s: float = 30.0
    offload_bytes: int = 16 * 1024
    max_path_bytes: int = 2048
    max_choices: int = 64
    cors_origins: tuple[str, ...] = ()
    draining: Callable[[], bool] = _never
    leaving: Callable[[], bool] = _never

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "body_timeout_s",
            "keepalive_s",
            "write_timeout_s",
            "max_path_bytes",
            "max_choices",
        ):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
