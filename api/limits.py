"""What a key may use in a minute: counting, refusing and the headers that tell.

Owns the translation of ``api.ports.QuotaState`` into each API's headers. Reads no clock but for the date at which an
Anthropic-shaped window is whole again.
"""

from datetime import timedelta

from api.errors import RateLimitError, Shape
from api.exchange import Exchange
from api.ports import QuotaState, Tenant
from api.services import Services


def take(services: Services, exchange: Exchange, tenant: Tenant, *, requests: int = 0, tokens: int = 0) -> None:
    """Count ``requests`` and ``tokens`` for a key; callers without a key have no limits.

    Raises:
        RateLimitError: they do not fit this minute; carries the seconds until the window is whole again.
    """
    if not tenant.key_id:
        return
    state = services.quota.take(tenant, requests=requests, tokens=tokens)
    if state.limit_requests or state.limit_tokens:
        _tell(services, exchange, state)
    if state.allowed:
        return
    if requests and state.limit_requests and state.remaining_requests < requests:
        what = f"{state.limit_requests} requests a minute"
    else:
        what = f"{state.limit_tokens} tokens a minute, {state.remaining_tokens} left, {tokens} asked for"
    raise RateLimitError(f"the key's limit is {what}; try again in {state.reset_s:.1f} s", retry_after_s=state.reset_s)


def _tell(services: Services, exchange: Exchange, state: QuotaState) -> None:
    counts: list[tuple[str, int, int]] = []
    if state.limit_requests:
        counts.append(("requests", state.limit_requests, state.remaining_requests))
    if state.limit_tokens:
        counts.append(("tokens", state.limit_tokens, max(0, state.remaining_tokens)))
    if exchange.shape is Shape.ANTHROPIC:
        reset_at = services.clock.now() + timedelta(seconds=state.reset_s)
        date = reset_at.strftime("%Y-%m-%dT%H:%M:%SZ")
        headers = {
            f"anthropic-ratelimit-{what}-{part}": value
            for what, limit, left in counts
            for part, value in (("limit", str(limit)), ("remaining", str(left)), ("reset", date))
        }
    else:
        headers = {
            f"x-ratelimit-{part}-{what}": value
            for what, limit, left in counts
            for part, value in (("limit", str(limit)), ("remaining", str(left)), ("reset", f"{state.reset_s:.3f}s"))
        }
    kept = [(name, value) for name, value in exchange.response_headers if name.decode() not in headers]
    exchange.response_headers[:] = [*kept, *((name.encode(), value.encode()) for name, value in headers.items())]
