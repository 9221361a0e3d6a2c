"""The ``proxy`` section of the configuration: nginx in front of the workers, and the rules of its keys.

Owns the section, its defaults and its rules. All of it goes into the configuration that ``zccp config --nginx`` prints,
so that no value may hold what nginx would read as syntax. Reads no file and no environment.
"""

import ipaddress
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket. Source: unix(7), ``sun_path`` and its ending NUL."""

_PLAIN = re.compile(r"[\w./:@%+,=~-]*", re.ASCII)


class ProxyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """nginx in front of the workers; with an empty ``directory`` there is none and nothing else here has an effect."""

    directory: Annotated[str, Meta(description="Directory of the workers' sockets for nginx; empty = no nginx.")] = ""
    body_directory: Annotated[
        str, Meta(description="Directory in memory where nginx leaves bodies; one for each appliance of a host.")
    ] = "/dev/shm/zccp-bodies"  # noqa: S108 - a directory of mode 0700 in the shared-memory file system
    host: Annotated[str, Meta(description="Address nginx listens on. Anything but loopback needs a certificate.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=1, le=65535, description="TCP port of nginx.")] = 8443
    certificate: Annotated[str, Meta(description="PEM file of the certificate chain; empty = plain HTTP.")] = ""
    certificate_key: Annotated[str, Meta(description="PEM file of its private key, which only nginx reads.")] = ""
    hsts_s: Annotated[
        int, Meta(ge=0, le=63_072_000, description="Time for which browsers insist on TLS (HSTS), s; 0 = not said.")
    ] = 0
    metrics_from: Annotated[
        tuple[str, ...], Meta(description="Addresses and networks that may read /metrics through nginx.")
    ] = ("127.0.0.1", "::1")
    log_directory: Annotated[str, Meta(description="Directory of nginx's access.log and error.log.")] = "/var/log/nginx"

    @property
    def sockets(self) -> Path:
        """The directory of the sockets."""
        return Path(self.directory)

    @property
    def bodies(self) -> Path:
        """The directory of the bodies."""
        return Path(self.body_directory)

    def socket_of(self, worker: int) -> Path:
        """The socket of one worker; the name is the same in every run, since nginx's configuration holds it."""
        return self.sockets / f"worker-{worker}.sock"


def with_absolute_paths(proxy: ProxyConfig) -> ProxyConfig:
    """The section with every path that is given made absolute."""
    names = ("directory", "body_directory", "certificate", "certificate_key", "log_directory")
    paths = {name: str(Path(value).expanduser().absolute()) for name in names if (value := getattr(proxy, name))}
    return msgspec.structs.replace(proxy, **paths)


def proxy_problem(proxy: ProxyConfig, workers: int) -> str | None:
    """The first rule that the section breaks, None where all hold.

    Args:
        proxy: the section, paths absolute.
        workers: number of workers, each of which has a socket.
    """
    return next(_problems(proxy, workers), None)


def _problems(proxy: ProxyConfig, workers: int) -> "Iterator[str]":
    for name in ("directory", "body_directory", "host", "certificate", "certificate_key", "log_directory"):
        value = getattr(proxy, name)
        if not _PLAIN.fullmatch(value):
            yield f"proxy.{name} is {value!r}; it may hold ASCII letters, digits and ./:@%+,=~_- only"
    if not proxy.host or "/" in proxy.host:
        yield f"proxy.host is {proxy.host!r}; it must be an address or a host name"
    for network in proxy.metrics_from:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            yield f"proxy.metrics_from has {network!r}, no address or network: {error}"
    if bool(proxy.certificate) != bool(proxy.certificate_key):
        yield "proxy.certificate and proxy.certificate_key belong together; give both or none"
    if not (proxy.body_directory and proxy.log_directory):
        yield "proxy.body_directory and proxy.log_directory must not be empty; nginx writes there"
    if not proxy.directory:
        return
    if len(bytes(proxy.socket_of(workers - 1))) > SOCKET_PATH_BYTES:
        yield (
            f"proxy.directory {proxy.directory} makes paths of sockets longer than {SOCKET_PATH_BYTES} bytes;"
            " choose a shorter one, such as /run/zccp/proxy"
        )
