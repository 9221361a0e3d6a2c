"""Releases: which store a node takes, what its configuration must leave open, and whose signature counts."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.building import _begin_release
from appliance.config import ApplianceConfig, build
from appliance.config_rules import ConfigError
from appliance.model.record import ModelRecord
from appliance.planning import plans_by_format, signing_key_file
from appliance.release import ReleaseError, adopt, plans_in, programs_of
from planner.catalogue import find_architecture
from planner.formats import KvFormat
from planner.plan import PlanError
from planner.signing import SigningKeyError, local_key, public_pem
from planner.store import StoreError

SMALL = find_architecture("smollm2-135m")
BUILT = {"target": "a100_sxm_80", "slots": 8, "context": 4096}


def record_of(name: str) -> ModelRecord:
    architecture = find_architecture(name)
    return ModelRecord(
        name=name, reference=name, architecture=architecture.to_json(), context=architecture.context, created=0,
        source_path="", source_files=(),
    )  # fmt: skip


RECORD = record_of("smollm2-135m")


def config_of(tmp_path: Path, engine=None, **sections) -> ApplianceConfig:
    paths = {"home": str(tmp_path / "home"), "run": str(tmp_path / "run")}
    return build({"engine": engine or {}, "paths": paths, **sections}, {})


@pytest.fixture
def release(tmp_path) -> Path:
    """Manifests as a build host writes them, without programs."""
    folder = tmp_path / "release"
    for kv_format, plan in plans_by_format(config_of(tmp_path, BUILT), SMALL, 4096).items():
        (folder / kv_format).mkdir(parents=True)
        (folder / kv_format / "manifest.json").write_text(json.dumps({"plan": plan.to_json()}))
    return folder


def adopted(tmp_path, release, engine=None, **sections) -> ApplianceConfig:
    return adopt(config_of(tmp_path, engine, programs={"directory": str(release)}, **sections))


def test_a_release_of_another_key_is_not_replaced_by_accident(tmp_path):
    theirs, ours = (public_pem(Ed25519PrivateKey.generate()) for _ in range(2))
    folder = tmp_path / "release"
    public = _begin_release(folder, theirs, force=False)
    assert not public.exists(), "it is written when the stores are whole"
    public.write_bytes(theirs)
    assert _begin_release(folder, theirs, force=False) == public
    with pytest.raises(StoreError, match="is signed by another key; choose another folder, or replace it with --force"):
        _begin_release(folder, ours, force=False)
    _begin_release(folder, ours, force=True)
    assert public.read_bytes() == theirs


def test_without_a_release_nothing_changes(tmp_path):
    config = config_of(tmp_path)
    assert adopt(config) is config


def test_what_is_left_open_is_as_the_programs_were_built(tmp_path, release):
    engine = adopted(tmp_path, release).engine
    assert (engine.target, engine.slots, engine.context, engine.kv_format) == ("a100_sxm_80", 8, 4096, "bf16")
    assert (engine.weight_form, engine.page_size, engine.implementation) == ("bf16", 128, "pallas")
    plan, directory, _ = programs_of(adopted(tmp_path, release), Path("/models/small"), RECORD)
    assert plan == plans_in(release)[KvFormat.BF16]
    assert directory == release / "bf16"


def test_a_format_may_be_named_or_left_to_what_fits(tmp_path, release):
    assert adopted(tmp_path, release, {"kv_format": "bmq2"}).engine.kv_format == "bmq2"
    assert adopted(tmp_path, release, {"kv_format": "auto"}).engine.kv_format == "bf16"


def test_a_setting_that_the_programs_were_not_built_with_is_refused_by_name(tmp_path, release):
    with pytest.raises(ConfigError) as caught:
        adopted(tmp_path, release, {"slots": 4, "target": "h100_sxm", "context": 4096})
    first, second = caught.value.problems
    assert first.startswith(f"engine.target is h100_sxm, and the programs in {release} were built with a100_sxm_80; ")
    assert second == (
        f"engine.slots is 4, and the programs in {release} were built with 8; leave it out or build them again"
    )


def test_a_format_that_is_not_there(tmp_path, release):
    with pytest.raises(ReleaseError, match=r"has programs for bf16, int8, bmq4, bmq2 and none for engine.kv_format fl"):
        adopted(tmp_path, release, {"kv_format": "float32"})


def test_no_programs(tmp_path):
    with pytest.raises(ReleaseError, match=r"holds no programs; build some with: zccp build --architecture NAME"):
        adopted(tmp_path, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": {}}', '{"plan": {"slots": 1}}'])
def test_a_damaged_manifest(tmp_path, release, text):
    (release / "int8" / "manifest.json").write_text(text)
    with pytest.raises(ReleaseError, match=r"int8/manifest.json is no manifest of a program store .*; build the relea"):
        adopted(tmp_path, release)


def test_the_number_of_pages_is_the_programs_own(tmp_path, release):
    """A build host may have been told how much memory pages get."""
    file = release / "bf16" / "manifest.json"
    document = json.loads(file.read_text())
    document["plan"]["num_pages"] = 77
    file.write_text(json.dumps(document))
    plan, _, _ = programs_of(adopted(tmp_path, release), Path("/models/small"), RECORD)
    assert plan.num_pages == 77


def test_a_release_of_another_model_keeps_its_name(tmp_path, release):
    """The plan is made from the model at hand; opening the store then tells the difference."""
    other = record_of("qwen3-8b")
    plan, _, _ = programs_of(adopted(tmp_path, release), Path("/models/other"), other)
    assert plan.architecture != plans_in(release)[KvFormat.BF16].architecture


class TestTrust:
    def key_of(self, tmp_path, release, **programs):
        config = config_of(tmp_path, programs={"directory": str(release), **programs})
        return programs_of(adopt(config), Path("/models/small"), RECORD)[2]

    def test_without_a_name_the_key_of_this_host(self, tmp_path, release):
        found = self.key_of(tmp_path, release)
        assert found == local_key(signing_key_file(tmp_path / "home")).public_key()

    def test_the_named_one_and_no_other(self, tmp_path, release):
        key = Ed25519PrivateKey.generate()
        (tmp_path / "operator.pem").write_bytes(public_pem(key))
        assert self.key_of(tmp_path, release, public_key=str(tmp_path / "operator.pem")) == key.public_key()

    def test_one_that_cannot_be_read(self, tmp_path, release):
        with pytest.raises(SigningKeyError, match=r"programs.public_key .*none.pem cannot be read: No such file"):
            self.key_of(tmp_path, release, public_key=str(tmp_path / "none.pem"))
        (tmp_path / "text.pem").write_text("no key")
        with pytest.raises(SigningKeyError, match="the public key of the program store cannot be read"):
            self.key_of(tmp_path, release, public_key=str(tmp_path / "text.pem"))


def test_auto_with_a_context_that_no_format_holds(tmp_path, release):
    for kv_format in ("bf16", "int8", "bmq4", "bmq2"):
        file = release / kv_format / "manifest.json"
        document = json.loads(file.read_text())
        document["plan"]["num_pages"] = 1
        file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=r"engine.kv_format auto: "):
        adopted(tmp_path, release, {"kv_format": "auto"})
