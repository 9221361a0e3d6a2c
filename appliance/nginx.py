"""nginx's configuration for this appliance: printed from the appliance's own, so that the two cannot disagree.

Owns the answers that nginx gives itself, in the clients' formats, and the figures that follow from the configuration.
Reads the template that lies beside this file; runs nothing and writes nothing.
"""

import math
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api.errors import (
    ApiError,
    BadRequestError,
    BodyTooLargeError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    NotReadyError,
    PathTooLongError,
    PermissionDeniedError,
    Shape,
    error_body,
)
from api.exchange import REQUEST_ID
from api.settings import ApiSettings
from appliance.config import ApplianceConfig
from appliance.http_server import PROXY_IDLE_S

TRACEPARENT = "00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
"""A valid ``traceparent`` of version 00. Source: W3C Trace Context, section 3.2."""
CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-ECDSA-CHACHA20-POLY1305", "ECDHE-RSA-CHACHA20-POLY1305",
)  # fmt: skip
"""Ciphers of TLS 1.2. Source: Mozilla's server-side TLS guidelines 5.7, intermediate, those with elliptic curves."""
IDLE_MARGIN_S = 60
READ_MARGIN_S = 30
SEND_MARGIN_S = 5
UNBOUNDED_READ_S = 86_400
"""Silence of a worker that nginx takes where requests have no time limit; a worker that ends is noticed at once."""

FLEET_BEGINNINGS = (4096, 2048, 1024, 512, 256)
"""Bytes of a body that choose its node: the most of these that it has."""
FLEET_BUFFER_BYTES = 4 << 20
"""Longest body whose beginning is known; a longer one goes to the node of its key."""
FLEET_REST_S = 5
"""Time for which a node that refused a request, or could not be reached, gets nothing."""
FLEET_CONNECT_S = 2
FLEET_TRIES = 3
"""How often a request that no node has is offered to another one."""
FLEET_REFUSAL_S = 10
"""A node refuses at once: a 503 that took longer comes from one that had the request and gave it up."""
FLEET_IDLE_S = 60
"""Longest pause on a connection to a node; the nodes' own nginx ends them after 75 s."""


class NginxConfigError(RuntimeError):
    """There can be no nginx for this configuration or account; the message says what to do."""


class WorkerLostError(ApiError):
    """The worker that had the request, or may have had it, ended before it answered."""

    status = 502
    code = "worker_lost"


class WorkerSilentError(ApiError):
    """A worker took the request and said nothing for the longest time nginx waits."""

    status = 504
    anthropic_type = "timeout_error"
    code = "worker_silent"


class HeadersTooLargeError(BadRequestError):
    """The request line and the headers pass nginx's bound."""

    status = 431
    code = "headers_too_large"


@dataclass(frozen=True, slots=True)
class _Page:
    """An answer of nginx's own: its status, nginx's codes for the cases, both bodies, and headers.

    A request whose first line nginx could not read has no path, and such a one can go to no location without a path.
    """

    status: int
    codes: tuple[int, ...]
    openai: str
    anthropic: str
    headers: tuple[tuple[str, str], ...]

    @property
    def is_named(self) -> bool:
        """Whether its location has a name and no path."""
        return self.status not in (400, 414)

    @property
    def place(self) -> str:
        """Its location."""
        return f"@zccp_{self.status}" if self.is_named else f"/.zccp/{self.status}"


def nginx_config(config: ApplianceConfig) -> str:
    """The whole ``nginx.conf`` for a configuration; nginx's workers run under the account that calls this.

    Raises:
        NginxConfigError: ``proxy.directory`` is empty, so the workers have no sockets for nginx; or the account has no
            name.
    """
    proxy, server = config.proxy, config.server
    if not proxy.directory:
        raise NginxConfigError(
            "proxy.directory is empty, so that the workers listen nowhere for nginx; set it, for example to"
            " /run/zccp/proxy"
        )
    return _rendered(
        "nginx.conf.template",
        config,
        sockets=[proxy.socket_of(worker) for worker in range(server.workers)],
        idle_s=PROXY_IDLE_S - IDLE_MARGIN_S,
        traceparent=TRACEPARENT,
    )


def fleet_config(config: ApplianceConfig) -> str:
    """The whole ``nginx.conf`` of the nginx in front of the nodes of ``fleet``, under the account that calls this.

    Raises:
        NginxConfigError: ``fleet.nodes`` is empty; or the account has no name.
    """
    fleet = config.fleet
    if not fleet.nodes:
        raise NginxConfigError("fleet.nodes is empty, so that there is nothing to be in front of; name the nodes")
    return _rendered(
        "nginx_fleet.conf.template",
        config,
        fleet=fleet,
        nodes=[(node.partition("://")[2], node in fleet.drained) for node in fleet.nodes],
        https=fleet.nodes[0].startswith("https"),
        beginnings=FLEET_BEGINNINGS,
        buffer_bytes=min(config.max_body_bytes, FLEET_BUFFER_BYTES),
        rest_s=FLEET_REST_S,
        connect_s=FLEET_CONNECT_S,
        tries=min(len(fleet.nodes), FLEET_TRIES),
        refusal_s=FLEET_REFUSAL_S,
        idle_s=FLEET_IDLE_S,
    )


def _rendered(name: str, config: ApplianceConfig, **more: object) -> str:
    """A template with what the two have in common, and more."""
    proxy, server = config.proxy, config.server
    connections = 2 * server.max_connections + 512
    # nothing is escaped: the rules of the configuration keep nginx's syntax out of every value
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = files("appliance").joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(template).render(
        account=_account(),
        proxy=proxy,
        connections=connections,
        files=2 * connections,
        listen=f"[{proxy.host}]:{proxy.port}" if ":" in proxy.host else f"{proxy.host}:{proxy.port}",
        both_families=proxy.host == "::",
        ciphers=":".join(CIPHERS),
        request_id=REQUEST_ID,
        pages=list(_pages(config.max_body_bytes)),
        max_body_bytes=config.max_body_bytes,
        body_s=math.ceil(ApiSettings().body_timeout_s),
        send_s=math.ceil(server.write_timeout_s) + SEND_MARGIN_S,
        read_s=math.ceil(server.request_timeout_s) + READ_MARGIN_S if server.request_timeout_s else UNBOUNDED_READ_S,
        hsts_s=proxy.hsts_s if proxy.certificate else 0,
        **more,
    )


def _account() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise NginxConfigError(f"uid {os.geteuid()} has no name, which nginx needs; run this as a named user") from None


def _pages(max_body_bytes: int) -> Iterator[_Page]:
    """What nginx answers where no worker does. 49x are its own codes for broken headers and TLS."""
    yield _page(
        BadRequestError("the request is no HTTP that this port takes; see that https, host and headers are right"),
        (400, 495, 496, 497),
    )
    yield _page(PermissionDeniedError("this path is not open to your address; see proxy.metrics_from"), (403,))
    yield _page(NotFoundError("there is nothing at this path; see the documentation for the paths"), (404,))
    yield _page(MethodNotAllowedError("this method is taken nowhere; use GET or POST", allow="GET, POST"), (405,))
    yield _page(
        BodyTooLargeError(
            f"the body passes {max_body_bytes} bytes, the most that is taken; send less, or raise server.max_body_mb"
        ),
        (413,),
    )
    yield _page(PathTooLongError("the path is too long; shorten it"), (414,))
    yield _page(HeadersTooLargeError("the headers are too long; send fewer or shorter ones"), (494,))
    yield _page(InternalError("internal error; the proxy's log has the cause under this request id"), (500,))
    yield _page(
        WorkerLostError("the worker that may have had the request is lost; send it again", retry_after_s=1.0),
        (502,),
    )
    yield _page(NotReadyError("nobody takes this request now; send it again"), (503,))
    yield _page(WorkerSilentError("the answer took too long and was given up; ask for less, or stream it"), (504,))


def _page(error: ApiError, codes: tuple[int, ...]) -> _Page:
    """An answer with nginx's variable in the place of the request id, as text within single quotes."""
    bodies = (error_body(error, shape, "$zccp_request_id").decode() for shape in Shape)
    openai, anthropic = (body.replace("\\", r"\\").replace("'", r"\'") for body in bodies)
    return _Page(error.status, codes, openai, anthropic, tuple(error.headers()))
