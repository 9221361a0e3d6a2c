"""The program store: round trip into another process, and everything that is refused."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planner import build as build_module
from planner import store as store_module
from planner.buckets import Bucket, Phase
from planner.build import build
from planner.formats import WeightForm
from planner.memory import MemoryPlanError
from planner.plan import program_key
from planner.program import empty_state, idle_arguments, serialise
from planner.signing import MANIFEST, SIGNATURE, public_pem
from planner.store import (
    StoreError,
    StoreMismatchError,
    StoreMissingError,
    StoreUntrustedError,
    open_store,
)
from planner.store_writer import StoreWriter
from planner.weights import weight_specs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(built_store, tmp_path) -> Path:
    directory = tmp_path / "programs"
    shutil.copytree(built_store.directory, directory)
    return directory


def opened(built_store, directory, plan=None):
    return open_store(directory, plan or built_store.plan, built_store.key.public_key())


def edit_manifest(directory: Path, key: Ed25519PrivateKey, change) -> None:
    """Change the manifest and sign it again."""
    document = json.loads((directory / MANIFEST).read_bytes())
    change(document)
    text = json.dumps(document).encode()
    (directory / MANIFEST).write_bytes(text)
    (directory / SIGNATURE).write_bytes(key.sign(text))


OTHER_PROCESS = """
import json, sys
import jax, numpy as np
from pathlib import Path
from planner.plan import Plan
from planner.program import empty_state, idle_arguments
from planner.signing import public_key
from planner.store import open_store
from planner.weights import weight_specs

events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
directory, plan_file, key_file, weights_file = map(Path, sys.argv[1:])
plan = Plan.from_json(json.loads(plan_file.read_text()))
store = open_store(directory, plan, public_key(key_file.read_bytes()))
programs = {program.bucket: program for program in store.load_all()}
weights = jax.device_put(dict(np.load(weights_file)))
state = empty_state(programs)
ids = []
for bucket, program in programs.items():
    if bucket.phase == "empty":
        continue
    arguments = idle_arguments(plan, bucket)
    if bucket.phase in ("set_slot", "write_pages"):
        state = program(state, *arguments)
    elif bucket.phase == "read_pages":
        state, _ = program(state, *arguments)
    else:
        state, out = program(weights, state, *arguments)
        ids.append(np.asarray(out.ids).tolist())
compiled = [name for name in events if "compile" in name]
jax.jit(lambda x: x + 1)(np.float32(1))
print(json.dumps({"ids": ids, "compiled": compiled, "listening": any("backend_compile" in name for name in events)}))
"""


def test_another_process_runs_the_programs_and_compiles_nothing(built_store, tmp_path):
    plan = built_store.plan
    rng = np.random.default_rng(0)
    weights = {}
    for name, spec in weight_specs(plan.architecture, plan.weight_form).items():
        codes = rng.integers(-127, 128, spec.shape, dtype=np.int8)
        weights[name] = codes if spec.dtype == "int8" else rng.standard_normal(spec.shape, dtype=np.float32)
    np.savez(tmp_path / "weights.npz", **weights)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    (tmp_path / "key.pem").write_bytes(public_pem(built_store.key))
    files = [built_store.directory, *(tmp_path / name for name in ("plan.json", "key.pem", "weights.npz"))]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["listening"], "a compilation would have been heard"
    assert answer["compiled"] == []
    state, here = empty_state(built_store.programs), []
    for bucket, program in built_store.programs.items():
        if bucket.phase in (Phase.DECODE, Phase.PREFILL):
            state, out = program(weights, state, *idle_arguments(plan, bucket))
            here.append(np.asarray(out.ids).tolist())
    assert answer["ids"] == here


def test_the_manifest_says_what_is_in_the_store(built_store):
    document = json.loads((built_store.directory / MANIFEST).read_bytes())
    assert {*document} == {"schema", "plan", "programs", *store_module.identity(built_store.plan)}
    keys = [entry["key"] for entry in document["programs"]]
    assert keys == [program_key(built_store.plan, bucket) for bucket in built_store.plan.buckets()]
    assert sorted(path.name for path in built_store.directory.iterdir()) == sorted(
        [MANIFEST, SIGNATURE, *(f"{key}.zst" for key in keys)]
    )
    for entry in document["programs"]:
        assert (built_store.directory / f"{entry['key']}.zst").stat().st_size == entry["num_bytes"]


def test_nothing_there(built_store, tmp_path):
    with pytest.raises(StoreMissingError, match=f"there is no program store in {tmp_path}; build it with: zccp build"):
        opened(built_store, tmp_path)


class TestTrust:
    def test_unsigned(self, built_store, copy):
        (copy / SIGNATURE).unlink()
        with pytest.raises(
            StoreUntrustedError, match=f"the manifest in {copy} is not signed by the key that is trusted here"
        ):
            opened(built_store, copy)

    def test_signed_by_another_key(self, built_store, copy):
        edit_manifest(copy, Ed25519PrivateKey.generate(), lambda document: None)
        with pytest.raises(StoreUntrustedError, match="is not signed by the key that is trusted here"):
            opened(built_store, copy)

    def test_a_manifest_changed_after_signing(self, built_store, copy):
        text = (copy / MANIFEST).read_bytes()
        (copy / MANIFEST).write_bytes(text.replace(b'"schema": 1', b'"schema":  1'))
        with pytest.raises(StoreUntrustedError, match="is not signed by the key that is trusted here"):
            opened(built_store, copy)

    def test_a_program_changed_after_signing_is_never_unpickled(self, built_store, copy, monkeypatch):
        bucket = built_store.plan.buckets()[0]
        path = copy / f"{program_key(built_store.plan, bucket)}.zst"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        monkeypatch.setattr(store_module, "deserialise", lambda *_: pytest.fail("it was unpickled"))
        store = opened(built_store, copy)
        with pytest.raises(StoreUntrustedError, match=f"{path} is not the file that was signed"):
            store.load(bucket)
        with pytest.raises(StoreUntrustedError, match="is not the file that was signed"):
            store.verify()

    def test_programs_cannot_be_exchanged(self, built_store, copy):
        first, second = (
            copy / f"{program_key(built_store.plan, bucket)}.zst" for bucket in built_store.plan.buckets()[:2]
        )
        shutil.copy(first, second)
        with pytest.raises(StoreUntrustedError, match=f"{second} is not the file that was signed"):
            list(opened(built_store, copy).load_all())

    def test_a_library_that_is_not_the_signed_one(self, built_store, copy):
        (copy / "native.so").write_bytes(b"anything")
        edit_manifest(copy, built_store.key, lambda document: document.update(library_sha256="0" * 64))
        with pytest.raises(StoreUntrustedError, match=r"native\.so is not the file that was signed"):
            opened(built_store, copy).load_all()
        (copy / "native.so").unlink()
        with pytest.raises(StoreError, match=r"native\.so is missing; rebuild it with: zccp build"):
            opened(built_store, copy).verify()


def test_a_missing_program(built_store, copy):
    bucket = built_store.plan.buckets()[1]
    path = copy / f"{program_key(built_store.plan, bucket)}.zst"
    path.unlink()
    store = opened(built_store, copy)
    with pytest.raises(StoreError, match=f"{path} is missing; rebuild it with: zccp build"):
        store.load(bucket)
    with pytest.raises(StoreError, match="is missing; rebuild it with: zccp build"):
        store.verify()
    with pytest.raises(StoreError, match=r"program decode-s9-c1-w4-.* is not in the manifest of"):
        store.load(Bucket(Phase.DECODE, 9, 1, 4))


class TestMismatch:
    """The store was signed by the right key, but for something else."""

    def differences(self, built_store, directory, plan=None) -> tuple[str, ...]:
        with pytest.raises(StoreMismatchError, match=r"does not fit:\n(.|\n)*\nrebuild it with: zccp build") as caught:
            opened(built_store, directory, plan)
        assert all(line in str(caught.value) for line in caught.value.differences)
        return caught.value.differences

    def test_another_weight_form(self, built_store):
        plan = replace(built_store.plan, weight_form=WeightForm.FLOAT32)
        assert self.differences(built_store, built_store.directory, plan) == (
            "weight_form: the store has int8, needed is float32",
            "plan weight_form: the store has int8, needed is float32",
        )

    def test_another_plan_names_what_differs_and_nothing_else(self, built_store):
        plan = replace(built_store.plan, num_pages=7)
        assert self.differences(built_store, built_store.directory, plan) == (
            "plan num_pages: the store has 4, needed is 7",
        )

    def test_another_model(self, built_store):
        plan = replace(built_store.plan, architecture=replace(built_store.plan.architecture, rope_theta=5e5))
        found = self.differences(built_store, built_store.directory, plan)
        assert found[0].startswith("architecture_sha256: the store has ")
        assert found[1] == "plan: differs in the architecture"

    def test_another_target(self, built_store):
        plan = replace(built_store.plan, target="cpu_x86_64_v3")
        assert "target: the store is for cpu_native, needed is cpu_x86_64_v3" in self.differences(
            built_store, built_store.directory, plan
        )

    @pytest.mark.parametrize("package", ["jax", "jaxlib"])
    def test_another_version(self, built_store, copy, package):
        def change(document):
            document["versions"][package] = "0.1.2"

        edit_manifest(copy, built_store.key, change)
        (line,) = self.differences(built_store, copy)
        assert line.startswith("versions: the store has {")
        assert f"'{package}': '0.1.2'" in line

    def test_other_kernel_sources(self, built_store, copy):
        edit_manifest(copy, built_store.key, lambda document: document.update(kernel_sources_sha256="abc"))
        (line,) = self.differences(built_store, copy)
        assert line.startswith("kernel_sources_sha256: the store has abc, needed is ")

    def test_a_store_of_another_format(self, built_store, copy):
        edit_manifest(copy, built_store.key, lambda document: document.update(schema=2))
        assert self.differences(built_store, copy) == ("schema: the store has 2, this version reads 1",)

    def test_a_cpu_that_lacks_what_the_programs_use(self, built_store, copy):
        def change(document):
            document["target"]["features"] += ["amx_from_the_future"]

        edit_manifest(copy, built_store.key, change)
        (line,) = self.differences(built_store, copy)
        assert line == (
            "target features: this CPU lacks ['amx_from_the_future']; it has [] besides what the store was built for"
        )

    def test_a_cpu_that_has_more_than_the_native_programs_use(self, built_store, copy):
        removed = []
        edit_manifest(copy, built_store.key, lambda document: removed.append(document["target"]["features"].pop()))
        (line,) = self.differences(built_store, copy)
        assert line == f"target features: this CPU lacks []; it has {removed} besides what the store was built for"

    def test_a_bounded_target_runs_wherever_its_features_are(self, built_store, monkeypatch):
        plan = replace(built_store.plan, target="cpu_x86_64_v3")
        document = {"schema": 1, **store_module.identity(plan), "plan": plan.to_json()}
        needed = document["target"]["features"]
        monkeypatch.setattr(store_module, "cpu_features", lambda: (*needed, "avx512f"))
        assert store_module.differences(document, plan) == ()
        monkeypatch.setattr(store_module, "cpu_features", lambda: tuple(f for f in needed if f != "avx2"))
        assert store_module.differences(document, plan) == (
            "target features: this CPU lacks ['avx2']; it has [] besides what the store was built for",
        )


def test_the_digest_of_the_sources_sees_kernels_and_ignores_cases(tmp_path, monkeypatch):
    for package in ("pallas_kernels", "planner"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store_module.resources, "files", lambda name: tmp_path / name)
    before = store_module._kernel_sources()
    (tmp_path / "pallas_kernels" / "sample" / "cases.py").write_text("CASES = ()\n")
    (tmp_path / "planner" / "schedule.py").write_text("\n")
    assert store_module._kernel_sources() == before
    for name in ("pallas_kernels/sample/xla.py", "pallas_kernels/linear/native.cc", "planner/decoder.py"):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        after = store_module._kernel_sources()
        assert after != before
        before = after


def write_store(directory, plan, programs, key, **options):
    with StoreWriter(directory, plan, key, **options) as writer:
        for program in programs.values():
            writer.add(serialise(program))
        writer.finish(None)


class TestWriting:
    def test_a_full_disk_leaves_the_old_store_and_the_finished_programs(self, built_store, copy, monkeypatch):
        write_bytes = Path.write_bytes

        def full(path, content):
            if path.suffix == ".sig":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write_bytes(path, content)

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(
            StoreError, match=f"program store {copy} cannot be written: .*No space left .*; free space or"
        ):
            write_store(copy, built_store.plan, built_store.programs, built_store.key)
        monkeypatch.undo()
        opened(built_store, copy).verify()
        with StoreWriter(copy, built_store.plan, built_store.key) as writer:
            assert set(writer.entries) == set(built_store.plan.buckets())
            writer.finish(None)
        assert [path.name for path in copy.parent.iterdir()] == [copy.name]

    def test_a_place_that_cannot_be_made(self, built_store, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match=r"cannot be written: .*; free space or choose another"):
            write_store(tmp_path / "file" / "programs", built_store.plan, built_store.programs, built_store.key)

    def test_a_failed_exchange_puts_the_old_store_back(self, built_store, copy, monkeypatch):
        rename = Path.rename

        def fail(path, target):
            if Path(target) == copy and not path.name.endswith("-old"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(StoreError, match="cannot be written"):
            write_store(copy, built_store.plan, built_store.programs, built_store.key)
        monkeypatch.undo()
        opened(built_store, copy).verify()

    def test_an_exchange_that_was_cut_off_is_put_right(self, built_store, copy):
        copy.rename(copy.with_name(f".{copy.name}-old"))
        with StoreWriter(copy, built_store.plan, built_store.key):
            opened(built_store, copy).verify()

    def test_two_builds_of_one_store_do_not_mix(self, built_store, copy):
        with (
            StoreWriter(copy, built_store.plan, built_store.key),
            pytest.raises(StoreError, match=f"another build of {copy} is running; wait for its end"),
        ):
            write_store(copy, built_store.plan, built_store.programs, built_store.key)
        write_store(copy, built_store.plan, built_store.programs, built_store.key)

    def test_a_new_store_replaces_the_old_one_whole(self, built_store, copy):
        (copy / "left-over.zst").write_bytes(b"")
        key = Ed25519PrivateKey.generate()
        write_store(copy, built_store.plan, built_store.programs, key)
        assert [path.name for path in copy.parent.iterdir()] == [copy.name]
        assert not (copy / "left-over.zst").exists()
        open_store(copy, built_store.plan, key.public_key()).verify()
        assert copy.stat().st_mode & 0o777 == 0o755

    def test_a_store_with_a_program_missing_is_none(self, built_store, copy):
        first, second, *rest = built_store.plan.buckets()
        with StoreWriter(copy, built_store.plan, built_store.key) as writer:
            writer.add(serialise(built_store.programs[first]))
            with pytest.raises(StoreError, match=f"lacks {', '.join(bucket.name for bucket in (second, *rest))}"):
                writer.finish(None)
        opened(built_store, copy).verify()


class TestGoingOn:
    """A build that was cut off after its first program."""

    @pytest.fixture
    def work(self, built_store, copy) -> Path:
        with StoreWriter(copy, built_store.plan, built_store.key) as writer:
            writer.add(serialise(built_store.programs[built_store.plan.buckets()[0]]))
        return copy.with_name(f".{copy.name}-partial")

    def taken_over(self, built_store, copy, **options) -> int:
        with StoreWriter(copy, options.pop("plan", built_store.plan), built_store.key, **options) as writer:
            return len(writer.entries)

    def test_what_is_finished_is_taken_over(self, built_store, copy, work):
        assert self.taken_over(built_store, copy) == 1
        assert self.taken_over(built_store, copy, fresh=True) == 0
        assert list(work.iterdir()) == []

    def test_programs_of_another_plan_are_not(self, built_store, copy, work):
        assert self.taken_over(built_store, copy, plan=replace(built_store.plan, num_pages=9)) == 0

    @pytest.mark.parametrize("kind", ["zst", "entry"])
    @pytest.mark.parametrize("fault", ["half", "changed", "gone"])
    def test_nor_is_what_this_key_did_not_sign(self, built_store, copy, work, kind, fault):
        (file,) = work.glob(f"*.{kind}")
        content = file.read_bytes()
        match fault:
            case "half":
                file.write_bytes(content[: len(content) // 2])
            case "changed":
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            case "gone":
                file.unlink()
        assert self.taken_over(built_store, copy) == 0

    def test_an_entry_of_one_program_is_none_for_another(self, built_store, copy, work):
        first, second = (program_key(built_store.plan, bucket) for bucket in built_store.plan.buckets()[:2])
        for kind in ("zst", "entry"):
            (work / f"{first}.{kind}").rename(work / f"{second}.{kind}")
        assert self.taken_over(built_store, copy) == 0


class TestBuilding:
    @pytest.fixture(autouse=True)
    def _compiled_before(self, built_store, monkeypatch):
        self.compiled = []

        def compiled(plan, buckets, threads):
            for bucket in buckets:
                self.compiled.append(bucket)
                yield serialise(built_store.programs[bucket])

        monkeypatch.setattr(build_module, "compiled", compiled)

    def build(self, built_store, directory, **options):
        return build(built_store.plan, directory, built_store.key, lambda *_: None, **options)

    def test_a_current_store_is_left_alone(self, built_store, copy):
        report = self.build(built_store, copy)
        assert (report.programs, report.compiled, self.compiled) == (6, 0, [])
        forced = self.build(built_store, copy, force=True)
        assert (forced.programs, forced.compiled, len(self.compiled)) == (6, 6, 6)
        assert replace(forced, compiled=0) == report, "both tell the same of the same store"
        assert report.total_bytes == sum(path.stat().st_size for path in copy.iterdir())
        assert report.memory.workspace_bytes > 0
        assert report.alias_fraction == 1.0

    @pytest.mark.parametrize("fault", ["missing program", "damaged program", "unsigned", "other plan"])
    def test_whatever_open_or_load_would_refuse_is_built_anew(self, built_store, copy, fault):
        program = copy / f"{program_key(built_store.plan, built_store.plan.buckets()[0])}.zst"
        match fault:
            case "missing program":
                program.unlink()
            case "damaged program":
                program.write_bytes(b"")
            case "unsigned":
                (copy / SIGNATURE).unlink()
            case "other plan":
                edit_manifest(copy, built_store.key, lambda document: document.update(plan_sha256=""))
        assert self.build(built_store, copy).compiled == 6
        opened(built_store, copy).verify()

    def test_a_build_that_was_cut_off_goes_on(self, built_store, tmp_path):
        told = []

        def stop(done, total, name):
            told.append((done, total))
            if done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build(built_store.plan, tmp_path / "new", built_store.key, stop)
        report = build(built_store.plan, tmp_path / "new", built_store.key, lambda *told_: told.append(told_[:2]))
        assert (report.programs, report.compiled) == (6, 4)
        assert told == [(done, 6) for done in range(1, 7)]
        assert self.compiled == list(built_store.plan.buckets())

    def test_programs_that_hold_the_pool_twice_are_no_store(self, built_store, tmp_path, monkeypatch):
        first = built_store.plan.buckets()[0]
        greedy = replace(built_store.programs[first], cost=replace(built_store.programs[first].cost, alias_bytes=7))
        monkeypatch.setitem(built_store.programs, first, greedy)
        with pytest.raises(MemoryPlanError, match=f"{first.name}: 7 bytes of the .* donated are updated in place"):
            self.build(built_store, tmp_path / "new")
        assert not (tmp_path / "new").exists()
