"""Whether nginx and the workers meet: the directories they share, the workers' sockets, and a request through nginx.

Owns what ``zccp doctor`` asks a running appliance. Reads directories and asks ``/health/live``; changes nothing.
"""

import ssl
from contextlib import suppress

import httpx

from appliance.config import ApplianceConfig
from appliance.config_proxy import ProxyConfig
from appliance.handoff import check_directory, check_memory

WAIT_S = 3.0


class ProxyProbeError(RuntimeError):
    """Something between nginx and the workers is not as it must be; the message says what to do after a semicolon."""


def probe(config: ApplianceConfig) -> str | None:
    """What was found in order; None where no worker listens, so that nothing beyond the directories can be asked.

    Raises:
        HandoffDirectoryError: a directory that exists is not fit.
        ProxyProbeError: a worker or nginx does not answer.
    """
    proxy = config.proxy
    for directory in (proxy.sockets, proxy.bodies):
        if directory.exists():
            check_directory(directory)
    if proxy.bodies.exists():
        check_memory(proxy.bodies)
    sockets = [proxy.socket_of(worker) for worker in range(config.server.workers)]
    missing = [path for path in sockets if not path.is_socket()]
    if len(missing) == len(sockets):
        return None
    if missing:
        raise ProxyProbeError(f"{missing[0]} is missing; see the log of the worker, and server.workers")
    for path in sockets:
        _ask(httpx.HTTPTransport(uds=str(path)), "http://worker/health/live", f"the worker at {path}", "see its log")
    remedy = "start nginx with what `zccp config --nginx` prints, and see its error.log"
    url = _url(proxy)
    _ask(httpx.HTTPTransport(verify=_trust(proxy)), f"{url}/health/live", f"nginx at {url}", remedy)
    return f"{len(sockets)} sockets in {proxy.directory}, bodies in {proxy.body_directory}, nginx answers at {url}"


def is_live(url: str) -> bool:
    """Whether an appliance answers there."""
    with suppress(httpx.HTTPError, ValueError):
        return httpx.get(f"{url}/health/live", timeout=WAIT_S).json() == {"status": "live"}
    return False


def local(host: str) -> str:
    """How this machine reaches what listens on ``host``, as it stands in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"[{host}]" if ":" in host else host


def _ask(transport: httpx.HTTPTransport, url: str, who: str, remedy: str) -> None:
    try:
        with httpx.Client(transport=transport, timeout=WAIT_S) as client:
            status = client.get(url).status_code
    except httpx.HTTPError as error:
        raise ProxyProbeError(f"{who} does not answer: {error}; {remedy}") from error
    if status != 200:
        raise ProxyProbeError(f"{who} answers with status {status}; {remedy}")


def _url(proxy: ProxyConfig) -> str:
    return f"{'https' if proxy.certificate else 'http'}://{local(proxy.host)}:{proxy.port}"


def _trust(proxy: ProxyConfig) -> ssl.SSLContext | bool:
    """A context that takes the configured certificate and no other; its names are the clients' business.

    Raises:
        ProxyProbeError: the certificate cannot be read.
    """
    if not proxy.certificate:
        return True
    try:
        context = ssl.create_default_context(cafile=proxy.certificate)
    except OSError as error:
        raise ProxyProbeError(
            f"certificate {proxy.certificate}: {error.strerror or error}; correct proxy.certificate"
        ) from error
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
