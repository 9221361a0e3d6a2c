"""A real nginx in front of a fleet: equal routes reach equal nodes, and a node that goes moves its own share alone."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from appliance.config import build
from appliance.config_rules import ConfigError
from appliance.nginx import NginxConfigError, fleet_config
from tests.support.front import Front, needs_nginx, nginx, shared_folder, write_certificate
from tests.support.live_server import free_port

CLIENT = httpx.Client()
KEYS = [{"authorization": f"Bearer key-{number}"} for number in range(40)]


@dataclass
class FakeNode:
    """Answers with its name; with 503 while it drains; ends the connection of the next request if told to.

    ``late_s`` is how long it thinks before it says anything.
    """

    name: str
    folder: Path | None = None
    draining: bool = False
    cut: int = 0
    late_s: float = 0.0
    asked: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    connections: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        node = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                node.connections.append(self.connection)

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                node.asked += 1
                node.headers = {name.lower(): value for name, value in self.headers.items()}
                time.sleep(node.late_s)
                if node.cut:
                    node.cut -= 1
                    self.close_connection = True
                    return
                body = json.dumps({"node": node.name}).encode()
                self.send_response(503 if node.draining else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if self.folder is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"{'https' if self.folder else 'http'}://127.0.0.1:{self.server.server_port}"

    def die(self) -> None:
        """Take no connection and end those that are open, as the kernel does for a process that is gone."""
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with suppress(OSError):  # which has ended before
                connection.shutdown(socket.SHUT_RDWR)


def as_printed(text: str) -> str:
    return text


@contextmanager
def fleet(
    count: int = 3, *, tls: bool = False, name: str = "localhost", change: Callable[[str], str] = as_printed
) -> Iterator[tuple[list[FakeNode], Front]]:
    with shared_folder() as folder, ExitStack() as stack:
        if tls:
            write_certificate(folder)
        nodes = [FakeNode(f"node-{number}", folder if tls else None) for number in range(count)]
        for one in nodes:
            stack.callback(one.die)
        section = {"nodes": [node.address for node in nodes]}
        if tls:
            section |= {"authority": str(folder / "cert.pem"), "server_name": name}
        proxy = {"log_directory": str(folder), "body_directory": str(folder / "bodies"), "port": free_port()}
        config = build({"fleet": section, "proxy": proxy, "server": {"max_body_mb": 8}}, {})
        yield nodes, stack.enter_context(nginx(config, folder, change, printed=fleet_config))


def send(front: Front, body: bytes = b"{}", **headers: str) -> str:
    answer = CLIENT.post(f"{front.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["node"]


@pytest.fixture(autouse=True, scope="module")
def closed_client() -> Iterator[None]:
    with CLIENT:
        yield


def homes(front: Front) -> list[str]:
    return [send(front, **key) for key in KEYS]


def node_lines(text: str) -> list[str]:
    """The lines of the nodes in what is printed."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith("server 127.0.0.1:")]


pytestmark = needs_nginx


def test_a_route_is_a_header_or_the_key_and_the_beginning_of_the_body() -> None:
    with fleet() as (nodes, front):
        by_header = [
            {send(front, bytes([65 + turn]) * 99, **{"x-zccp-route": f"r{n}"}) for turn in range(3)} for n in range(16)
        ]
        assert all(len(found) == 1 for found in by_header)
        assert {next(iter(found)) for found in by_header} == {node.name for node in nodes}
        assert "x-zccp-route" not in nodes[0].headers
        assert nodes[0].headers["x-forwarded-for"] == "127.0.0.1"
        text = "".join(f"Paragraph {number} of a long document. " for number in range(400)).encode()
        for beginning in (256, 512, 1024, 2048, 4096):
            for start in (0, 700, 2900):
                same = text[start : start + beginning]
                ends = (b"", b"?", b"\0\n\xff" * 40, b'"and more"}')
                assert len({send(front, same + end) for end in ends}) == 1
        large = text * 60
        assert len({send(front, large + end) for end in (b"a", b"b", b"c")}) == 1
        spread = {send(front, f"{number}".encode() + text) for number in range(16)}
        assert spread == {node.name for node in nodes}
        assert len({send(front, text, **key) for key in KEYS[:20]}) == 3
        assert len({send(front, text, **{"x-api-key": str(n)}) for n in range(20)}) == 3


def test_a_body_that_is_too_long_to_be_known_goes_by_its_key() -> None:
    with fleet() as (_, front):
        long = b"x" * (6 << 20)
        assert len({send(front, head + long, authorization="Bearer a") for head in (b"1", b"2", b"3")}) == 1
        answer = httpx.post(f"{front.url}/v1/messages", content=b"x" * (9 << 20))
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "request_too_large"


def test_a_dead_node_moves_its_own_share_and_gets_it_back_from_a_new_configuration() -> None:
    with fleet(4) as (nodes, front):
        before = homes(front)
        assert len(set(before)) == 4
        nodes[1].die()
        after = homes(front)
        moved = {number for number in range(len(KEYS)) if before[number] != after[number]}
        assert moved == {number for number in range(len(KEYS)) if before[number] == "node-1"}
        assert len({after[number] for number in moved}) > 1
    with fleet(4) as (nodes, front), fleet(4) as (_, other):
        left = [node.address for node in nodes if node.name != "node-1"]
        proxy = {"log_directory": str(other.folder), "body_directory": str(other.folder / "b2"), "port": free_port()}
        config = build({"fleet": {"nodes": left}, "proxy": proxy}, {})
        before = homes(front)
        with shared_folder() as folder, nginx(config, folder, printed=fleet_config) as smaller:
            after = homes(smaller)
        assert [b for b, a in zip(before, after, strict=True) if a != b] == ["node-1"] * before.count("node-1")


def test_a_draining_node_gets_no_more_than_a_trial_and_no_request_fails() -> None:
    with fleet() as (nodes, front):
        before = homes(front)
        drained = next(node for node in nodes if node.name == before[0])
        drained.draining, drained.asked = True, 0
        after = homes(front)
        assert drained.name not in after
        assert drained.asked <= 4  # one for each of nginx's processes, which then tell each other
        assert all(a == b for a, b in zip(after, before, strict=True) if b != drained.name)


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_request_that_a_node_may_have_is_never_given_to_another(method: str) -> None:
    with fleet() as (nodes, front):
        home = next(node for node in nodes if node.name == send(front, b"{}"))
        for node in nodes:
            node.asked, node.cut = 0, 1
        answer = httpx.request(method, f"{front.url}/v1/completions", content=b"{}", headers={"x-request-id": "mine"})
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "worker_lost"
        assert answer.json()["request_id"] == "mine"
        assert answer.headers["retry-after"] == "1"
        assert [node.asked for node in nodes] == [int(node is home) for node in nodes]
        for node in nodes:
            node.cut = 0
        assert send(front, b"{}") != home.name  # which is left alone for a while


def test_a_node_that_says_nothing_for_too_long_is_a_504_and_no_other_is_asked() -> None:
    with fleet(2, change=lambda text: text.replace("proxy_read_timeout 86400s", "proxy_read_timeout 1s")) as (
        nodes,
        front,
    ):
        for node in nodes:
            node.late_s = 2.0
        answer = httpx.post(f"{front.url}/v1/completions", content=b"{}")
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "worker_silent"
        assert sum(node.asked for node in nodes) == 1


def test_a_late_503_is_of_a_node_that_had_the_request_and_goes_to_the_client() -> None:
    timeout = "proxy_next_upstream_timeout 10s"
    with fleet(change=lambda text: text.replace(timeout, "proxy_next_upstream_timeout 1s")) as (nodes, front):
        for node in nodes:
            node.draining, node.late_s = True, 1.5
        assert httpx.post(f"{front.url}/v1/completions", content=b"{}").status_code == 503
        assert sum(node.asked for node in nodes) == 1
        for node in nodes:
            node.draining, node.late_s = False, 0.0
        assert len(set(homes(front))) == len(nodes)  # none is left alone for it


def test_a_node_that_refuses_and_one_that_is_gone_leave_the_third() -> None:
    with fleet() as (nodes, front):
        nodes[0].draining = True
        nodes[1].die()
        assert homes(front) == ["node-2"] * len(KEYS)
        large = b"x" * (6 << 20)
        assert send(front, large, authorization="Bearer a") == "node-2"
        logged = [json.loads(line) for line in front.log().splitlines()]
        assert {line["status"] for line in logged} == {"200"}
        assert any(" : " in line["node"] for line in logged)


def test_no_node_left_is_a_503_in_the_client_s_format() -> None:
    with fleet(2) as (nodes, front):
        for node in nodes:
            node.die()
        for _ in range(2):
            answer = httpx.post(f"{front.url}/v1/messages", content=b"{}", headers={"x-request-id": "mine"})
            assert answer.status_code == 503
            assert answer.json()["request_id"] == answer.headers["x-request-id"] == "mine"
            assert answer.json()["error"]["type"] == "overloaded_error"
            assert answer.headers["retry-after"] == "2"
        assert httpx.get(f"{front.url}/metrics").status_code == 403


def test_a_drained_node_gets_nothing_and_moves_its_own_share_alone() -> None:
    with fleet(4) as (nodes, front):
        before = homes(front)
        config = build(
            {
                "fleet": {"nodes": [node.address for node in nodes], "drained": [nodes[2].address]},
                "proxy": {"log_directory": str(front.folder), "body_directory": str(front.folder / "b2"),
                          "port": free_port()},
            },
            {},
        )  # fmt: skip
        lines, drained = node_lines((front.folder / "nginx.conf").read_text()), node_lines(fleet_config(config))
        assert [new.removesuffix(";") for new in drained] == [
            old.removesuffix(";") + " down" * (place == 2) for place, old in enumerate(lines)
        ]
        nodes[2].asked = 0
        with shared_folder() as folder, nginx(config, folder, printed=fleet_config) as other:
            after = homes(other)
        assert nodes[2].asked == 0
        assert [b for b, a in zip(before, after, strict=True) if a != b] == ["node-2"] * before.count("node-2")


def test_only_drained_nodes_are_a_503() -> None:
    with shared_folder() as folder:
        node = f"http://127.0.0.1:{free_port()}"
        proxy = {"log_directory": str(folder), "body_directory": str(folder / "bodies"), "port": free_port()}
        config = build({"fleet": {"nodes": [node], "drained": [node]}, "proxy": proxy}, {})
        with nginx(config, folder, printed=fleet_config) as front:
            assert httpx.post(f"{front.url}/v1/completions", content=b"{}").status_code == 503


def test_nothing_of_a_route_is_logged() -> None:
    with fleet() as (_, front):
        send(front, b"CANARY body", authorization="Bearer CANARY-key", **{"x-zccp-route": "CANARY-route"})
        httpx.post(f"{front.url}/v1/completions?key=CANARY", content=b"{}")
        assert '"path":"/v1/completions"' in front.log()
        assert "CANARY" not in front.log() + front.log("error.log")


def test_nodes_over_tls_are_recognised_by_their_certificate() -> None:
    with fleet(2, tls=True) as (nodes, front):
        assert send(front) in {node.name for node in nodes}
    with fleet(2, tls=True, name="another.example") as (_, front):
        assert httpx.post(f"{front.url}/v1/completions", content=b"{}").status_code == 503


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"nodes": ["10.0.0.1:80"]}, "fleet.nodes has '10.0.0.1:80'; a node is http://host:port"),
        ({"nodes": ["http://a:80/;x"]}, "a node is http://host:port"),
        ({"nodes": ["http://a:99999"]}, "a node is http://host:port"),
        ({"nodes": ["http://a:1", "http://a:1"]}, "names a node twice"),
        ({"nodes": ["http://a:1", "https://b:1"]}, "speaks one of them to all nodes"),
        ({"nodes": ["https://a:1"]}, "needs fleet.authority and fleet.server_name"),
        ({"nodes": ["http://a:1"], "drained": ["http://b:1"]}, "fleet.drained has 'http://b:1', which is not in"),
        ({"server_name": "a b"}, "fleet.server_name is 'a b'; it may hold ASCII letters"),
    ],
)
def test_rules(section: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build({"fleet": section}, {})


def test_a_front_that_others_reach_needs_a_certificate() -> None:
    with pytest.raises(ConfigError, match=r"proxy.host 0.0.0.0 is reachable from other machines and there is no cert"):
        build({"fleet": {"nodes": ["http://a:1"]}, "proxy": {"host": "0.0.0.0"}}, {})


def test_without_nodes_there_is_no_fleet() -> None:
    with pytest.raises(NginxConfigError, match=r"fleet.nodes is empty"):
        fleet_config(build({}, {}))
