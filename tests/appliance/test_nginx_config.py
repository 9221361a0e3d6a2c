"""What ``zccp config --nginx`` prints: every figure follows from the configuration, and nginx takes it."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.errors import error_body, shape_of
from appliance import nginx as printed
from appliance.cli import main
from appliance.config import ApplianceConfig, build
from appliance.config_rules import ConfigError, host_problems
from appliance.http_server import PROXY_IDLE_S
from appliance.nginx import NginxConfigError, nginx_config
from tests.support.front import NGINX, needs_nginx, proxy_sections, shared_folder

SECTION = {"directory": "/run/zccp/proxy"}


def made(proxy: Mapping[str, object] | None = None, **server: object) -> ApplianceConfig:
    return build({"server": server, "proxy": {**SECTION, **(proxy or {})}}, {})


def directives(config: ApplianceConfig) -> dict[str, list[str]]:
    """Every directive that has no block, with its values in order."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"(?m)^\s+(\w+) ([^{}\n]+);$", nginx_config(config)):
        found.setdefault(name, []).append(value)
    return found


def test_figures_follow_from_the_configuration() -> None:
    config = made(workers=3, max_body_mb=2.5, max_connections=100, write_timeout_s=7.5, request_timeout_s=90)
    found = directives(config)
    assert found["server"] == [f"unix:/run/zccp/proxy/worker-{i}.sock max_fails=0" for i in range(3)]
    assert found["client_max_body_size"] == [str(5 << 19)] == [str(config.max_body_bytes)]
    assert found["worker_connections"] == ["712"]
    assert found["send_timeout"] == ["13s"]
    assert found["proxy_read_timeout"] == ["120s"]
    assert found["listen"] == ["127.0.0.1:8443 default_server backlog=4096"]
    assert found["client_body_temp_path"] == ["/dev/shm/zccp-bodies"]
    assert "ssl_certificate" not in found
    assert directives(made())["proxy_read_timeout"] == ["86400s"]


def test_tls_is_modern_and_hsts_is_said_where_asked_for() -> None:
    tls = {"host": "::", "certificate": "/c.pem", "certificate_key": "/k.pem"}
    found = directives(made({**tls, "hsts_s": 10}))
    assert found["listen"] == ["[::]:8443 ssl http2 default_server backlog=4096 ipv6only=off"]
    assert found["ssl_protocols"] == ["TLSv1.2 TLSv1.3"]
    assert (found["ssl_certificate"], found["ssl_certificate_key"]) == (["/c.pem"], ["/k.pem"])
    assert all(name.startswith("ECDHE-") and "CBC" not in name for name in found["ssl_ciphers"][0].split(":"))
    hsts = [value for value in found["add_header"] if value.startswith("Strict")]
    assert set(hsts) == {'Strict-Transport-Security "max-age=10" always'}
    assert len(hsts) == 1 + sum(
        "$zccp_error_" in line and "return" in line for line in nginx_config(made(tls)).splitlines()
    )
    assert "Strict" not in nginx_config(made(tls))


def test_bc_187_nginx_gives_up_an_idle_connection_before_the_worker_does() -> None:
    upstream, _client = (int(value.removesuffix("s")) for value in directives(made())["keepalive_timeout"])
    assert upstream <= PROXY_IDLE_S / 2


def test_nothing_that_is_not_idempotent_is_sent_twice() -> None:
    assert directives(made())["proxy_next_upstream"] == ["error"]


def test_every_error_of_nginxs_own_is_one_that_the_api_could_have_written() -> None:
    text = nginx_config(made())
    pages = list(printed._pages(1000))
    assert [page.status for page in pages] == [400, 403, 404, 405, 413, 414, 431, 500, 502, 503, 504]
    for page in pages:
        for shape in (page.openai, page.anthropic):
            document = json.loads(shape.replace(r"\'", "'").replace(r"\\", "\\"))
            assert document["request_id"] == "$zccp_request_id"
            assert shape.count("$") == 1
        assert text.count(f"{page.place}") == 2
    busy = next(page for page in pages if page.status == 503)
    assert dict(busy.headers) == {"retry-after": "2"}


def test_the_format_is_chosen_as_the_api_chooses_it() -> None:
    text = nginx_config(made())
    (pattern,) = re.findall(r'map \$request_uri \$zccp_shape_of_path \{\s+default openai;\s+"~(.*)" anthropic;', text)
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions", "/v1/models", "/"):
        assert bool(re.match(pattern, path)) is (shape_of(path, []) == "anthropic")
    assert error_body is printed.error_body


@pytest.mark.parametrize(
    ("proxy", "problem"),
    [
        ({"directory": "/run/a b"}, r"proxy.directory is '/run/a b'; it may hold ASCII letters, digits and"),
        ({"body_directory": "/dev/shm/x;user root"}, r"proxy.body_directory is .* it may hold"),
        ({"certificate": "/c'.pem", "certificate_key": "/k.pem"}, r"proxy.certificate is .* it may hold"),
        ({"certificate": "/$c", "certificate_key": "/k.pem"}, r"proxy.certificate is .* it may hold"),
        ({"log_directory": "/var/log/{a}"}, r"proxy.log_directory is .* it may hold"),
        ({"log_directory": ""}, r"proxy.body_directory and proxy.log_directory must not be empty; nginx writes there"),
        ({"host": ""}, r"proxy.host is ''; it must be an address or a host name"),
        ({"host": "[::1]"}, r"proxy.host is '\[::1\]'; it may hold"),
        ({"certificate": "/c.pem"}, r"proxy.certificate and proxy.certificate_key belong together"),
        ({"host": "0.0.0.0"}, r"proxy.host 0.0.0.0 is reachable from other machines and there is no certificate"),
        ({"port": 8000}, r"proxy.port and server.port are both 8000 on 127.0.0.1"),
        ({"port": 0}, r"proxy.port is 0; it must be between 1 and 65535"),
        ({"metrics_from": ["10.0.0.1/8"]}, r"proxy.metrics_from has '10.0.0.1/8', no address or network"),
        ({"metrics_from": ["all"]}, r"proxy.metrics_from has 'all', no address or network"),
        ({"directory": "/run/" + "x" * 90}, r"makes paths of sockets longer than 107 bytes; choose a shorter one"),
        ({"hsts_s": -1}, r"proxy.hsts_s is -1; it must be between 0 and 63072000"),
    ],
)
def test_broken_rules_are_named(proxy: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        made(proxy)


def test_paths_are_made_absolute_and_may_be_as_long_as_the_kernel_takes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = made({"directory": "/run/" + "x" * 88, "log_directory": "logs"}, workers=10)
    assert len(bytes(config.proxy.socket_of(9))) == 107
    assert config.proxy.log_directory == str(tmp_path / "logs")
    assert build({}, {}).proxy.directory == ""


def test_a_reachable_nginx_needs_keys() -> None:
    tls = {"host": "0.0.0.0", "certificate": "/c.pem", "certificate_key": "/k.pem"}

    def problems(config: ApplianceConfig, *, keys: bool = False) -> list[str]:
        return host_problems(config, keys_present=keys, free_bytes=lambda _: 1 << 40)

    (problem,) = problems(made(tls))
    assert problem.startswith("proxy.host 0.0.0.0 is reachable from other machines and there is no API key")
    assert problems(made(tls), keys=True) == []
    assert problems(made()) == []
    assert problems(made({**tls, "directory": ""})) == []


def test_without_a_directory_there_is_nothing_to_print() -> None:
    with pytest.raises(NginxConfigError, match=r"proxy\.directory is empty"):
        nginx_config(build({}, {}))


def test_the_verb_prints_it_and_takes_address_and_certificate(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("proxy: {directory: /run/zccp/proxy}\n")
    options = ["--host", "192.0.2.1", "--port", "443", "--certificate", "/c.pem", "--certificate-key", "/k.pem"]
    done = CliRunner().invoke(main, ["config", "--config", str(file), "--nginx", *options])
    assert done.exit_code == 0
    assert "        listen 192.0.2.1:443 ssl http2 default_server backlog=4096;\n" in done.stdout
    assert done.stdout.endswith("}\n")
    as_json = CliRunner().invoke(main, ["config", "--config", str(file), "--nginx", "--json", *options])
    assert json.loads(as_json.stdout) == {"nginx": done.stdout}
    for arguments, code, problem in (
        (["--port", "443"], 2, "--host, --port, --certificate and --certificate-key need --nginx"),
        (["--nginx", "--certificate", "/c.pem"], 2, "proxy.certificate and proxy.certificate_key belong together"),
        (["--nginx", "--host", "0.0.0.0"], 2, "there is no certificate"),
    ):
        done = CliRunner().invoke(main, ["config", "--config", str(file), *arguments])
        assert done.exit_code == code
        assert problem in done.stderr
    file.write_text("")
    done = CliRunner().invoke(main, ["config", "--config", str(file), "--nginx"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "proxy.directory is empty" in done.stderr


@needs_nginx
@pytest.mark.parametrize("tls", [False, True])
def test_nginx_takes_it(tls: bool) -> None:
    assert NGINX is not None
    with shared_folder() as folder:
        config = build({"server": {"workers": 2}, "proxy": proxy_sections(folder, tls=tls) | {"hsts_s": 5}}, {})
        (folder / "nginx.conf").write_text(nginx_config(config))
        options = ["-e", str(folder / "error.log"), "-g", f"pid {folder}/pid;", "-c", str(folder / "nginx.conf")]
        done = subprocess.run([NGINX, "-t", *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "[warn]" not in done.stderr
        assert config.proxy.bodies.stat().st_mode & 0o777 == 0o700
