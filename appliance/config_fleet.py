"""The ``fleet`` section of the configuration: several appliances behind one nginx, and the rules of its keys.

Owns the section, its defaults and its rules. Used on the host of that nginx alone, where ``zccp config --nginx-fleet``
prints its configuration; the nodes themselves do not read it. No value may hold what nginx would read as syntax. Reads
no file and no environment.
"""

import re
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

_NODE = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
_PLAIN = re.compile(r"[\w./:@%+,=~-]*", re.ASCII)


class FleetConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes behind one nginx, which takes address, certificate and limits from ``proxy`` and ``server``."""

    nodes: Annotated[
        tuple[str, ...],
        Meta(description="Addresses of the nodes as http://host:port or https://host:port; empty = no fleet."),
    ] = ()
    drained: Annotated[
        tuple[str, ...],
        Meta(description="Those of the nodes that get no requests; they keep their places among the others."),
    ] = ()
    authority: Annotated[
        str, Meta(description="PEM file of the authority that signed the nodes' certificates; needed with https.")
    ] = ""
    server_name: Annotated[str, Meta(description="Name in the certificates of all nodes; needed with https.")] = ""


def fleet_problem(fleet: FleetConfig) -> str | None:
    """The first rule that the section breaks, None where all hold."""
    return next(_problems(fleet), None)


def _problems(fleet: FleetConfig) -> Iterator[str]:
    for node in fleet.nodes:
        if not _NODE.fullmatch(node) or not 0 < int(node.rpartition(":")[2]) < 65536:
            yield f"fleet.nodes has {node!r}; a node is http://host:port or https://host:port"
            return
    if len(set(fleet.nodes)) < len(fleet.nodes):
        yield "fleet.nodes names a node twice; a node takes one share"
    stranger = next((node for node in fleet.drained if node not in fleet.nodes), None)
    if stranger is not None:
        yield f"fleet.drained has {stranger!r}, which is not in fleet.nodes; name it there as well, or in neither"
    schemes = {urlsplit(node).scheme for node in fleet.nodes}
    if len(schemes) > 1:
        yield "fleet.nodes has http:// and https://; one nginx speaks one of them to all nodes"
    for name in ("authority", "server_name"):
        value = getattr(fleet, name)
        if not _PLAIN.fullmatch(value):
            yield f"fleet.{name} is {value!r}; it may hold ASCII letters, digits and ./:@%+,=~_- only"
    if schemes == {"https"} and not (fleet.authority and fleet.server_name):
        yield "fleet.nodes with https:// needs fleet.authority and fleet.server_name, by which nodes are recognised"
