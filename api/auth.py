"""Who is asking: from headers to a tenant.

Owns the reading of ``authorization`` and ``x-api-key``. Never logs, echoes or keeps a key.
"""

from api.errors import AuthenticationError, PermissionDeniedError
from api.exchange import Exchange
from api.ports import KeyRing, Tenant

ANONYMOUS = Tenant(name="anonymous", key_id="")
"""Whoever calls without a valid key where none is needed."""

_HINT = "send 'Authorization: Bearer <key>' or 'x-api-key: <key>'"


def authenticate(exchange: Exchange, keys: KeyRing) -> Tenant:
    """The tenant of a request, also put into the exchange.

    A key may come in either header on every route. When several are given, each must be valid and all of one tenant:
    a good key never hides a bad one. Where no key is needed, an unknown key counts as none.

    Raises:
        AuthenticationError: a key is needed and missing, malformed or wrong.
    """
    tenant: Tenant | None = None
    wrong = ""
    for name, value in exchange.headers:
        if name == b"x-api-key":
            key = value
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() != b"bearer":
                wrong = f"the authorization scheme is not Bearer; {_HINT}"
                continue
            key = key.strip(b" ")
        else:
            continue
        found = keys.find(key) if key else None
        if found is None:
            wrong = wrong or f"the API key is not valid; {_HINT}"
        elif tenant is not None and tenant != found:
            wrong = "two different API keys were given; send one"
        else:
            tenant = found
    if not keys.open and (wrong or tenant is None):
        raise AuthenticationError(wrong or f"an API key is needed; {_HINT}")
    exchange.tenant = ANONYMOUS if tenant is None or wrong else tenant
    return exchange.tenant


def require_admin(exchange: Exchange, keys: KeyRing) -> None:
    """Refuse a request that needs the admin scope, where keys are needed at all.

    Raises:
        AuthenticationError: see ``authenticate``.
        PermissionDeniedError: the key is valid but has no admin scope.
    """
    if not authenticate(exchange, keys).admin and not keys.open:
        raise PermissionDeniedError("this path needs a key with the admin scope; ask the operator for one")
