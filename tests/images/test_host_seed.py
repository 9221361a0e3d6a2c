"""The seed's form, and the configuration that follows from it."""

import pytest

from appliance.config import build
from images.host.seed import Seed, SeedError, configuration, read_seed
from images.recipe import read_recipe
from images.tree import defaults

GOOD = "hostname: gpu-1\nkeys: {schema: 1}\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBlocksOfNothing admin"


def test_a_seed_needs_a_name_and_keys() -> None:
    seed = read_seed(f"{GOOD}authorized_keys: ['{KEY}']\n")
    assert (seed.hostname, seed.authorized_keys, seed.tls, seed.config) == ("gpu-1", (KEY,), None, {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hostname: gpu-1\n", "missing required field `keys`"),
        ("hostname: gpu-1\nkeys: {}\n", "keys is empty"),
        ("hostname: -gpu\nkeys: {a: 1}\n", "hostname '-gpu'"),
        ("hostname: gpu_1\nkeys: {a: 1}\n", "hostname 'gpu_1'"),
        (f"hostname: {'a' * 64}\nkeys: {{a: 1}}\n", "1 to 63"),
        (f"{GOOD}passwort: x\n", "unknown field `passwort`"),
        (f"{GOOD}authorized_keys: [no key]\n", r"authorized_keys\[0\] is no public SSH key"),
        (f"{GOOD}authorized_keys: ['{KEY}\\nssh-rsa AAAA']\n".replace("'", '"'), r"authorized_keys\[0\]"),
        ("[1, 2", "seed.yaml"),
        ("hostname: 5\nkeys: {a: 1}\n", "Expected `str`"),
        (f"{GOOD}tls: {{certificate: x}}\n", "missing required field `key`"),
    ],
)
def test_a_wrong_seed_is_told_with_the_place(text: str, told: str) -> None:
    with pytest.raises(SeedError, match=told):
        read_seed(text)


def test_the_host_decides_over_the_seed_and_the_seed_over_the_image() -> None:
    seed = Seed("gpu-1", {"a": 1}, model="other", config={"server": {"workers": 2, "host": "0.0.0.0"}})
    made = configuration({"server": {"workers": 1, "max_body_mb": 4}, "engine": {"slots": 4}}, seed, "secret")
    assert made["server"] == {"workers": 2, "max_body_mb": 4, "host": "127.0.0.1", "port": 8000}
    assert made["model"] == {"reference": "other"}
    assert made["engine"] == {"slots": 4}
    assert made["cache"]["redis_url"] == "redis://:secret@127.0.0.1:6379/0"


@pytest.mark.parametrize("name", list(read_recipe().variants))
def test_the_configuration_of_every_variant_is_one_that_the_appliance_takes(name: str) -> None:
    document = configuration(defaults(read_recipe().variant(name)), Seed("gpu-1", {"a": 1}), "secret")
    config = build(document, {})
    assert config.proxy.port == 443
    assert config.programs.directory == "/usr/lib/zccp-host/programs"
