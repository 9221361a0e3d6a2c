"""Program store: the directory of compiled programs that a build host writes and a node loads.

Owns its format and the loading; ``planner.store_writer`` writes it. A store is ``manifest.json``, ``manifest.sig``
(Ed25519 over the manifest), one ``<key>.zst`` a program and ``native.so`` where programs call native kernels; their
SHA-256 stand in the manifest. Nothing is unpickled before signature and hash are verified, and nothing is loaded that
was built from another plan, by other versions, for other instruction sets or from other kernel sources.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pallas_kernels import native
from pallas_kernels.platform import cpu_features
from planner.buckets import Bucket
from planner.plan import Plan, program_key
from planner.program import Program, ProgramCost, SerialisedProgram, deserialise
from planner.signing import MANIFEST, SIGNATURE, verifies
from planner.target import Target, find_target

SCHEMA = 1
LIBRARY = "native.so"
_PACKAGES = {"cpu": ("jax", "jaxlib"), "cuda": ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")}
"""Packages of a platform whose versions a program is bound to."""
_MISSING = "not installed"
_SHAPES_ONLY = ("cases.py", "model_shapes.py")
_PLANNER_SOURCES = (
    "axes.py",
    "batch.py",
    "decoder.py",
    "page_moves.py",
    "program.py",
    "rope.py",
    "sharding.py",
    "weights.py",
)


class StoreError(ValueError):
    """A store cannot be used; the message says what is wrong with it and how to build it anew."""


class StoreMissingError(StoreError):
    """There is no store in the directory."""


class StoreUntrustedError(StoreError):
    """The manifest is unsigned or signed by another key, or a program is not the one that was signed."""


class StoreMismatchError(StoreError):
    """The store was built for something else; ``differences`` lists it line by line."""

    def __init__(self, message: str, differences: tuple[str, ...]) -> None:
        super().__init__(message)
        self.differences = differences


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One program as the manifest describes it."""

    key: str
    sha256: str
    num_bytes: int
    cost: ProgramCost


def identity(plan: Plan) -> dict[str, Any]:
    """What a store must have been built from to serve this plan on this host."""
    target = find_target(plan.target)
    return {
        "target": {"name": target.name, "platform": target.platform, "features": list(_features(target))},
        "architecture_sha256": digest(plan.architecture.to_json()),
        "weight_form": str(plan.weight_form),
        "plan_sha256": plan.digest(),
        "versions": {name: _version(name) for name in _PACKAGES[target.platform]},
        "kernel_sources_sha256": _kernel_sources(),
    }


@dataclass(frozen=True, slots=True)
class ProgramStore:
    """A verified store: every program in it may be loaded here."""

    directory: Path
    plan: Plan
    entries: Mapping[str, StoreEntry]
    library_sha256: str | None = None

    def register_library(self) -> None:
        """Load the native kernels that the programs call, if they call any, after checking them against the manifest.

        Raises:
            StoreError: the library is missing or cannot be loaded.
            StoreUntrustedError: it is not the signed one.
        """
        if self.library_sha256 is None:
            return
        library = self._signed(LIBRARY, self.library_sha256)
        try:
            native.register(library)
        except native.NativeBuildError as error:
            raise StoreError(f"{self.directory / LIBRARY}: {error}; rebuild it with: zccp build") from error

    def verify(self) -> None:
        """Check that everything the manifest lists is there with the signed bytes, without loading any of it.

        Raises:
            StoreError: a program or the library is missing.
            StoreUntrustedError: the bytes of one are not the signed ones.
        """
        for bucket in self.plan.buckets():
            self._packed(bucket)
        if self.library_sha256 is not None:
            self._signed(LIBRARY, self.library_sha256)

    def load(self, bucket: Bucket) -> Program:
        """One program, its bytes checked against the signed hash first.

        Raises:
            StoreError: the program is not in the store.
            StoreUntrustedError: its bytes are not the signed ones.
        """
        entry, packed = self._packed(bucket)
        return deserialise(self.plan, SerialisedProgram(bucket, entry.cost, zstandard.decompress(packed)))

    def load_all(self) -> Iterator[Program]:
        """Every program of the plan, the native kernels first."""
        self.register_library()
        return (self.load(bucket) for bucket in self.plan.buckets())

    def _packed(self, bucket: Bucket) -> tuple[StoreEntry, bytes]:
        key = program_key(self.plan, bucket)
        entry = self.entries.get(key)
        if entry is None:
            raise StoreError(f"program {key} is not in the manifest of {self.directory}; rebuild it with: zccp build")
        return entry, self._signed(f"{key}.zst", entry.sha256)

    def _signed(self, name: str, sha256: str) -> bytes:
        path = self.directory / name
        if not path.is_file():
            raise StoreError(f"{path} is missing; rebuild it with: zccp build")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise StoreUntrustedError(f"{path} is not the file that was signed; rebuild it with: zccp build")
        return content


def open_store(directory: Path, plan: Plan, key: Ed25519PublicKey) -> ProgramStore:
    """Verify a store and that it was built for this plan on this kind of host.

    Raises:
        StoreMissingError: nothing is there.
        StoreUntrustedError: the signature is missing or another key's.
        StoreMismatchError: it was built for something else.
    """
    manifest_path, signature_path = directory / MANIFEST, directory / SIGNATURE
    if not manifest_path.is_file():
        raise StoreMissingError(f"there is no program store in {directory}; build it with: zccp build")
    text = manifest_path.read_bytes()
    if not signature_path.is_file() or not verifies(key, signature_path.read_bytes(), text):
        raise StoreUntrustedError(
            f"the manifest in {directory} is not signed by the key that is trusted here; rebuild it with: zccp build, "
            "or name the key that signed it in programs.public_key"
        )
    manifest = json.loads(text)
    found = differences(manifest, plan)
    if found:
        listing = "\n  ".join(found)
        raise StoreMismatchError(
            f"the program store in {directory} does not fit:\n  {listing}\nrebuild it with: zccp build", found
        )
    entries = {
        item["key"]: StoreEntry(item["key"], item["sha256"], item["num_bytes"], ProgramCost(**item["cost"]))
        for item in manifest["programs"]
    }
    return ProgramStore(directory, plan, entries, manifest.get("library_sha256"))


def differences(manifest: Mapping[str, Any], plan: Plan) -> tuple[str, ...]:
    """What a manifest says otherwise than this plan on this host needs, a line each."""
    if manifest.get("schema") != SCHEMA:
        return (f"schema: the store has {manifest.get('schema')}, this version reads {SCHEMA}",)
    wanted = identity(plan)
    platform = wanted["target"]["platform"]
    lacking = [name for name, version in wanted["versions"].items() if version == _MISSING]
    if lacking:
        where = f"target: the programs are for {wanted['target']['name']}, of platform {platform}"
        return (f"{where}, and this installation has no {' and no '.join(lacking)}; serve them where such devices are",)
    lines = [
        f"{name}: the store has {manifest.get(name)}, needed is {value}"
        for name, value in wanted.items()
        if name not in ("plan_sha256", "target") and manifest.get(name) != value
    ]
    lines += _target_lines(manifest.get("target", {}), wanted["target"])
    if manifest.get("plan_sha256") != wanted["plan_sha256"]:
        lines += _plan_lines(manifest.get("plan", {}), plan.to_json())
    return tuple(lines)


def _target_lines(store: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    if store.get("name") != wanted["name"]:
        return [f"target: the store is for {store.get('name')}, needed is {wanted['name']}"]
    has, needs = set(cpu_features()), set(store.get("features", ()))
    # a native target is exactly its host; any other one runs wherever its instruction sets are
    if has == needs if wanted["name"].endswith("_native") else needs <= has:
        return []
    missing, extra = sorted(needs - has), sorted(has - needs)
    return [f"target features: this CPU lacks {missing}; it has {extra} besides what the store was built for"]


def _plan_lines(store: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    lines = [
        f"plan {name}: the store has {store.get(name)}, needed is {value}"
        for name, value in wanted.items()
        if name != "architecture" and store.get(name) != value
    ]
    return lines or ["plan: differs in the architecture"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _MISSING


def _features(target: Target) -> tuple[str, ...]:
    return target.features if target.features or target.platform != "cpu" else cpu_features()


def digest(document: Any) -> str:
    """SHA-256 of a document of JSON values."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _kernel_sources() -> str:
    """SHA-256 over every source file that a program is made from, names included."""
    digest = hashlib.sha256()
    kernels = Path(str(resources.files("pallas_kernels")))
    planner = Path(str(resources.files("planner")))
    files = sorted(
        file for file in kernels.rglob("*") if file.suffix in (".py", ".cc", ".h") and file.name not in _SHAPES_ONLY
    )
    files += [planner / name for name in _PLANNER_SOURCES]
    for file in files:
        digest.update(f"{file.parent.name}{os.sep}{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
