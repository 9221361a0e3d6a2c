"""A whole node behind a real nginx, for tests: both as an operator would run them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.config import build
from tests.support.front import Front, nginx, proxy_sections, shared_folder
from tests.support.node import Node, node


@contextmanager
def fronted_node(
    tmp_path: Path, *, delay_ms: float = 0.0, workers: int = 2, tls: bool = False, drain_s: float = 5
) -> Iterator[tuple[Node, Front]]:
    """Run both; ``tls`` makes a certificate for nginx."""
    with shared_folder() as folder:
        sections = {
            "proxy": proxy_sections(folder, tls=tls),
            "server": {"workers": workers, "drain_s": drain_s},
            "shared_memory": {"segment_count": 16, "cleanup_interval_ms": 1000},
        }
        with node(tmp_path, delay_ms=delay_ms, **sections) as running:
            running.wait_ready()
            port = int(running.url.rsplit(":", 1)[1])
            sections["server"]["port"] = port
            with nginx(build({**sections, "paths": {"home": str(tmp_path / "home")}}, {}), folder) as front:
                yield running, front
