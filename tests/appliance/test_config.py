"""The configuration: every rule, with the words an operator reads."""

from pathlib import Path

import pytest

from appliance import config as configuration
from appliance.config import ApplianceConfig, build, load
from appliance.config_cache import redis_hosts, without_secrets
from appliance.config_reference import reference, reference_markdown
from appliance.config_rules import ConfigError, host_problems, is_loopback, plain


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ZCCP_CONFIG", "ZCCP_HOME", "ZCCP_RUN", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZCCP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(configuration, "SYSTEM_CONFIG", tmp_path / "no-system-config.yaml")


def made(**sections: object) -> ApplianceConfig:
    return build(sections, {})


def test_defaults_hold_every_rule() -> None:
    config = made()
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert (config.shared_memory.segment_count, config.shared_memory.segment_size_kb) == (128, 1024)
    assert config.shared_memory.cleanup_interval_ms == 30_000
    assert config.model.reference == "smollm2-135m"
    assert config.log.log_prompts is False


def test_documented_page_size_in_bytes_of_ids() -> None:
    assert made(gpu={"paged_attention_page_size": 2048}).page_size == 512
    assert made(engine={"page_size": 32}).page_size == 32
    assert made(engine={"page_size": 32}, gpu={"paged_attention_page_size": 128}).page_size == 32
    assert made().page_size is None


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"servr": {}}, "servr is not a key of the configuration; did you mean server?"),
        ({"server": {"prot": 1}}, r"server.prot is not a key .* did you mean port\?"),
        ({"server": {"xyz": 1}}, "server.xyz is not a key of the configuration; known keys: host, port, "),
        ({"server": {"port": "8000"}}, r"server.port is '8000' \(str\); it must be a whole number"),
        ({"server": {"port": True}}, r"server.port is True \(bool\); it must be a whole number"),
        ({"server": {"port": 70_000}}, "server.port is 70000; it must be between 0 and 65535"),
        ({"server": {"http2": "no"}}, "server.http2 is 'no' .* must be true or false"),
        ({"server": {"host": 1}}, "server.host is 1 .* must be text"),
        ({"server": {"drain_s": float("nan")}}, "server.drain_s is nan; it must be between 0 and 3600"),
        ({"server": {"cors_origins": "x"}}, "server.cors_origins is 'x' .* must be a list"),
        ({"server": {"cors_origins": [1]}}, r"server.cors_origins\[0\] is 1 .* must be text"),
        ({"server": {"cors_origins": ["a.b/c"]}}, "an origin is \\* or http"),
        ({"server": {"cors_origins": ["http://[x"]}}, r"server.cors_origins has 'http://\[x'; an origin is \* or http"),
        ({"engine": {"max_waiting_tokens": 1}}, "engine.max_waiting_tokens is 1; .* between 64 and 2147483648$"),
        ({"server": {"max_body_mb": 0}}, "server.max_body_mb is 0; it must be between 0.001 and 1024$"),
        ({"model": {"reference": ""}}, "model.reference is empty; it must be a catalogue name, a path or hf:org/name"),
        ({"model": {"aliases": {1: "m"}}}, "model.aliases has the key 1; it must be text"),
        ({"paths": {"home": "/a\0b"}}, r"paths.home is '/a\\x00b'; a path has no NUL character"),
        ({"server": {"host": "http://x"}}, "server.host is 'http://x'; it must be an address or a host name"),
        ({"server": []}, r"server is \[\] \(list\); it must be a mapping of keys"),
        ({"cache": {"csf_minhash_hashes": 64}}, "cache.csf_minhash_hashes is 64; it must be one of 128, 256"),
        ({"cache": {"redis_url": "http://x"}}, "cache.redis_url must begin with redis://"),
        ({"cache": {"redis_url": "redis://u:p@ss/w@h"}}, r"cache.redis_url must be redis://\[user:password@\]host"),
        ({"cache": {"redis_url": "redis://h:x"}}, "cache.redis_url is no URL; write @ : / and % in a password as %40"),
        ({"cache": {"redis_url": "redis://"}}, "cache.redis_url must be redis://"),
        ({"cache": {"redis_url": "unix://"}}, "cache.redis_url with unix:// needs the path of a socket"),
        ({"cache": {"redis_url": "redis://h?password=x"}}, "cache.redis_url sets 'password', which has no place there"),
        ({"cache": {"redis_url": "rediss://h?socket_timeout=9"}}, "cache.redis_url sets 'socket_timeout'"),
        ({"cache": {"redis_url": "redis://h?ssl_keyfile=/k"}}, "options of TLS and begins with redis://"),
        ({"cache": {"redis_url": "redis://a,b:6380"}}, "names several hosts, which only a cluster has"),
        ({"cache": {"redis_url": "redis://a,:1", "redis_cluster": True}}, "cache.redis_url is no URL"),
        ({"cache": {"redis_url": "redis://a,b:x", "redis_cluster": True}}, "cache.redis_url is no URL"),
        ({"cache": {"redis_timeout_ms": 0}}, "cache.redis_timeout_ms is 0; it must be between 1 and 1000"),
        ({"cache": {"node_name": " a"}}, "cache.node_name is ' a'; it must be printable text"),
        (
            {"cache": {"csf_mask_patterns": ["date", "("]}},
            r"cache.csf_mask_patterns\[1\]: '\(' is no regular expression that RE2 takes: missing \)",
        ),
        (
            {"cache": {"volatile_headers": ["billing"]}},
            "'billing' is no pattern with a name; those are anthropic_billing",
        ),
        (
            {"cache": {"volatile_headers": ["(?=x)y"]}},
            r"cache.volatile_headers\[0\]: .* no regular expression that RE2",
        ),
        ({"cache": {"csf_mask_patterns": ["dates"]}}, "'dates' is no pattern with a name; those are patient_id"),
        ({"cache": {"csf_mask_patterns": ["a.b"] * 33}}, "cache.csf_mask_patterns has 33 patterns; at most 32"),
        ({"shared_memory": {"segment_size_kb": 1022}}, "segment_size_kb is 1022; it must be a multiple of 4"),
        ({"shared_memory": {"segment_size_kb": 512}}, "segment_size_kb is 512; .* at least 516"),
        (
            {"shared_memory": {"segment_count": 8}, "server": {"workers": 2}},
            "segment_count 8 leaves 4 segments to each",
        ),
        ({"engine": {"page_size": 48}}, "engine.page_size is 48; it must be a power of two between 16 and 512"),
        ({"engine": {"page_size": 8}}, "engine.page_size is 8; it must be between 16 and 512"),
        ({"engine": {"page_size": 64, "kv_format": "bmq4"}}, "kv_format bmq4 needs a multiple of 128"),
        ({"engine": {"page_size": 64}, "gpu": {"paged_attention_page_size": 2048}}, "differ; give one of them"),
        ({"gpu": {"paged_attention_page_size": 130}}, "must be a multiple of 4, the bytes of one id"),
        ({"engine": {"prefill_chunk": 100}}, "engine.prefill_chunk is 100; it must be a multiple of 16"),
        ({"engine": {"step_timeout_s": 0.5}}, "engine.step_timeout_s is 0.5; it must be 0 or at least 1"),
        ({"engine": {"kv_format": "fp8"}}, "engine.kv_format is 'fp8'; it must be one of "),
        ({"engine": {"context": 200_000}}, "engine.context is 200000; it must be between 64 and 131072"),
        ({"model": {"aliases": ["a"]}}, "model.aliases is .* must be a mapping"),
        ({"model": {"aliases": {"gpt": ""}}}, "model.aliases.gpt is empty"),
        ({"model": {"name": "m", "aliases": {"m": "m"}}}, "model.aliases names 'm'"),
        ({"log": {"log_prompts": True}}, "prompts are never logged, so only false is accepted"),
    ],
)
def test_each_rule_names_key_value_and_bound(sections: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build(sections, {})


def test_all_broken_rules_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"server": {"port": -1, "workers": 0}, "gpu": {"device": 1}}, {})
    assert [problem.split()[0] for problem in caught.value.problems] == ["server.port", "server.workers", "gpu.device"]


def test_empty_sections_are_defaults() -> None:
    assert build({"server": None}, {}) == made()


def test_file_environment_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("server:\n  port: 9000\n  workers: 2\nmodel:\n  aliases: {gpt-4o: smollm2-135m}\n")
    assert load(file).server.port == 9000
    monkeypatch.setenv("ZCCP_CONFIG", str(file))
    config = load(None, {"server": {"port": 9001}})
    assert (config.server.port, config.server.workers) == (9001, 2)
    assert config.model.aliases == {"gpt-4o": "smollm2-135m"}


def test_paths_come_from_file_environment_or_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(paths={"home": str(tmp_path / "a")}).home == tmp_path / "a"
    assert made().home == tmp_path / "home"
    assert made().run == tmp_path / "home" / "run"
    assert made().keys_file == tmp_path / "home" / "keys.json"
    monkeypatch.setenv("ZCCP_RUN", str(tmp_path / "run"))
    assert made().run == tmp_path / "run"
    monkeypatch.delenv("ZCCP_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert made().home == tmp_path / "data" / "zccp"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("server:\n  port: 1\n  port: 2\n", "key 'port' on line 3 was already given on line 2"),
        ("a: [\n", "line 2: "),
        ("- a\n", "holds a list; it must be a mapping of sections"),
        ("? [a]\n: 1\n", "the key on line 1 is no plain value; it must be the name of a key"),
        ("\nserver: {host: 2001-99-99}\n", "line 2: a value that looks like timestamp is not one; correct it"),
        ("a: !!int b\n", "line 1: a value that looks like int is not one"),
        ("a: !!timestamp b\n", "line 1: a value that looks like timestamp is not one"),
        (f"a: {'1' * 5000}\n", "line 1: a value that looks like int is not one"),
        (f"a: {'[' * 3000}\n", "is nested too deeply; sections hold keys, and keys hold plain values"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml")


def test_syntax_errors_do_not_quote_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("cache:\n  redis_url: 'redis://:CANARY@h\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert "CANARY" not in str(caught.value)


def test_empty_file_is_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# nothing\n")
    assert load(file) == made()


def test_more_connections_than_files_are_refused() -> None:
    def problems(most: int, **sections: dict) -> list[str]:
        return host_problems(
            made(**sections), keys_present=False, free_bytes=lambda _: 1 << 40, most_files=lambda: most
        )

    assert problems(1152) == []
    (problem,) = problems(1151)
    assert problem.startswith(
        "server.max_connections 1024 needs 1152 open files in a worker and the system allows 1151; raise the hard limit"
    )
    assert problems(640, server={"workers": 2}) == []
    behind = {"proxy": {"directory": "/run/zccp/proxy"}}
    assert problems(4224, **behind) == []
    assert len(problems(4223, **behind)) == 1


def test_more_memory_than_the_system_has_is_refused() -> None:
    config = made(shared_memory={"segment_count": 100, "segment_size_kb": 1024})
    (problem,) = host_problems(config, keys_present=False, free_bytes=lambda _: 50 << 20)
    assert problem.startswith(
        "shared_memory: 100 segments of 1024 KiB, and a spare share of 100 for reloads, need 200 MiB and /dev/shm has"
        " 50 MiB free"
    )
    assert host_problems(config, keys_present=False, free_bytes=lambda _: 200 << 20) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_other_machines_need_a_key_or_an_explicit_word(host: str) -> None:
    def problems(*, keys: bool, **auth: bool) -> list[str]:
        config = made(server={"host": host}, auth=auth)
        return host_problems(config, keys_present=keys, free_bytes=lambda _: 1 << 40)

    (problem,) = problems(keys=False)
    assert problem.startswith(f"server.host {host} is reachable from other machines and there is no API key in")
    assert problems(keys=True) == []
    assert problems(keys=False, allow_unauthenticated_non_loopback=True) == []


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_shown_configuration_hides_the_password() -> None:
    config = made(cache={"redis_url": "redis://user:CANARY@h:6379/0"})
    shown = plain(config)
    assert shown["cache"]["redis_url"] == "redis://***@h:6379/0"
    assert "CANARY" not in repr(shown)


@pytest.mark.parametrize("password", ["CANARY/x", "x@CANARY", "CANARY?a", "CAN#ARY", "x//CANARY"])
def test_a_password_that_is_not_escaped_is_neither_taken_nor_shown(password: str) -> None:
    url = f"redis://user:{password}@h:6379/0"
    assert "CANARY" not in without_secrets(url)
    try:
        told = repr(plain(made(cache={"redis_url": url})))
    except ConfigError as error:
        told = str(error)
    assert "CANARY" not in told


@pytest.mark.parametrize(
    "url",
    [
        "redis://h", "redis://h:6379/3", "rediss://u:p%40@h:6379?ssl_ca_certs=/a.pem&ssl_check_hostname=false",
        "unix:///run/redis.sock?db=1", "unix://u:p@/run/redis.sock", "redis://[::1]:6379",
    ],
)  # fmt: skip
def test_addresses_of_redis(url: str) -> None:
    assert made(cache={"redis_url": url}).cache.redis_url == url


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("redis://h", ("redis://h", ())),
        ("rediss://u:p%40@a:1,b,[::1]:7/0?ssl_ca_certs=/a,b.pem",
         ("rediss://u:p%40@a:1/0?ssl_ca_certs=/a,b.pem", (("b", 6379), ("::1", 7)))),
        ("redis://:a,b@[::1],c:2", ("redis://:a,b@[::1]", (("c", 2),))),
        ("unix:///run/a,b.sock", ("unix:///run/a,b.sock", ())),
    ],
)  # fmt: skip
def test_hosts_of_a_cluster(url: str, hosts: tuple) -> None:
    assert redis_hosts(url) == hosts
    cluster = bool(hosts[1])
    assert made(cache={"redis_url": url, "redis_cluster": cluster}).cache.redis_url == url


def test_shown_configuration_is_accepted_again() -> None:
    config = made(server={"port": 9}, model={"aliases": {"a": "b"}}, engine={"page_size": 16})
    assert build(plain(config), {}) == config


def test_reference_describes_every_key() -> None:
    rows = reference()
    assert len(rows) == sum(len(section.__struct_fields__) for section in made().__struct_fields__ for section in [
        getattr(made(), section)
    ])  # fmt: skip
    assert all(row.meaning.endswith((".", ";")) or row.meaning for row in rows)
    assert all(row.meaning and row.type and row.default for row in rows)
    table = reference_markdown()
    assert "| `server.port` | whole number | `8000` | 0 to 65 535 |" in table
    assert "| `ZCCP_CONFIG` |" in table


def test_children_get_no_secrets_and_know_their_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZCCP_API_KEY", "secret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/x")
    for environment in (
        configuration.worker_environment(tmp_path), configuration.engine_environment(made(), tmp_path),
    ):  # fmt: skip
        assert "ZCCP_API_KEY" not in environment
        assert "NOTIFY_SOCKET" not in environment
        assert environment["PROMETHEUS_MULTIPROC_DIR"] == str(tmp_path)
    assert configuration.engine_environment(made(), tmp_path)["JAX_PLATFORMS"] == "cpu"


def test_the_engine_sees_as_many_devices_as_share_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    one, several = made(gpu={"device_id": 2}), made(gpu={"device_id": 2}, engine={"devices": 3})
    assert configuration.engine_environment(one, tmp_path)["CUDA_VISIBLE_DEVICES"] == "2"
    assert configuration.engine_environment(one, tmp_path)["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    environment = configuration.engine_environment(several, tmp_path)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3,4"
    assert environment["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2 --xla_force_host_platform_device_count=3"
    cards = made(engine={"devices": 3, "target": "a100_sxm_80"})
    environment = configuration.engine_environment(cards, tmp_path)
    assert environment["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    assert "JAX_PLATFORMS" not in environment


@pytest.mark.parametrize(("limit", "share"), [(None, "0.9748"), (40_000, "0.4929")])
def test_xla_takes_what_the_memory_plan_counts_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int | None, share: str
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    card = made(gpu={"memory_limit_mb": limit}, engine={"target": "a100_sxm_80"})
    environment = configuration.engine_environment(card, tmp_path)
    assert environment["XLA_CLIENT_MEM_FRACTION"] == share
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment


@pytest.mark.parametrize(("mib", "problems"), [(0, 0), (1023, 0), (1024, 1), (4096, 1)])
def test_a_tier_is_smaller_than_the_memory_of_the_host(mib: int, problems: int) -> None:
    config = made(cache={"host_tier_mb": mib})
    free, gib = lambda _: 1 << 40, lambda: 1 << 30
    found = host_problems(config, keys_present=False, free_bytes=free, memory_bytes=gib)
    told = f"cache.host_tier_mb {mib} is not below the 1024 MiB of memory that this host has"
    assert [problem[: len(told)] for problem in found] == [told] * problems
