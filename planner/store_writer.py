"""StoreWriter: a program store in the making. Programs come in one by one; what an ended build finished is kept.

Owns the work folder beside the store, its lock, and the exchange of the old store for the new one. Every finished
program lies there with a signed entry, so that the next build of the same plan goes on where the last one ended and
takes nothing for finished that it did not sign.
"""

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planner.buckets import Bucket
from planner.plan import Plan, program_key
from planner.program import ProgramCost, SerialisedProgram
from planner.signing import MANIFEST, SIGNATURE, verifies
from planner.store import LIBRARY, SCHEMA, StoreEntry, StoreError, digest, identity

_LEVEL = 3


class StoreWriter:
    """Writes a store; use as a context.

    The old store stays until ``finish``. A build that ends before leaves its work folder for the next one.

    Args:
        directory: where the store goes.
        plan: what the programs are compiled from.
        key: signs the manifest.
        fresh: take nothing over from an earlier build.

    Raises:
        StoreError: the place cannot be written, or another build works on it.
    """

    def __init__(self, directory: Path, plan: Plan, key: Ed25519PrivateKey, *, fresh: bool = False) -> None:
        self._directory = directory
        self._work = directory.with_name(f".{directory.name}-partial")
        self._old = directory.with_name(f".{directory.name}-old")
        self._plan = plan
        self._key = key
        self._identity = identity(plan)
        self._digest = digest({"schema": SCHEMA, **self._identity})
        self._fresh = fresh
        self.entries: dict[Bucket, StoreEntry] = {}
        """The programs that are finished."""

    def __enter__(self) -> "StoreWriter":  # noqa: PYI034 - tests check annotations, and not this one
        try:
            self._work.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self._work, os.O_RDONLY)
        except OSError as error:
            raise self._cannot(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._old.exists() and not self._directory.exists():
                self._old.rename(self._directory)  # an exchange was cut off in the middle
            shutil.rmtree(self._old, ignore_errors=True)
            self._take_over()
        except BlockingIOError as error:
            os.close(self._lock)
            raise StoreError(f"another build of {self._directory} is running; wait for its end") from error
        except OSError as error:
            os.close(self._lock)
            raise self._cannot(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def add(self, program: SerialisedProgram) -> None:
        """Keep a finished program.

        Raises:
            StoreError: the disk is full or the folder cannot be written.
        """
        packed = zstandard.compress(program.payload, _LEVEL)
        name = program_key(self._plan, program.bucket)
        entry = StoreEntry(name, hashlib.sha256(packed).hexdigest(), len(packed), program.cost)
        message = self._message(entry)
        try:
            (self._work / f"{name}.zst").write_bytes(packed)
            (self._work / f"{name}.entry").write_bytes(self._key.sign(message) + message)
        except OSError as error:
            raise self._cannot(error) from error
        self.entries[program.bucket] = entry

    def finish(self, library: bytes | None) -> None:
        """Write the manifest and put the store in its place.

        Args:
            library: the native kernels that the programs call, if they call any.

        Raises:
            StoreError: a program is missing, the disk is full, or the directory cannot be written; the old store is
                untouched.
        """
        buckets = self._plan.buckets()
        if missing := [bucket.name for bucket in buckets if bucket not in self.entries]:
            raise StoreError(f"program store {self._directory} lacks {', '.join(missing)}")
        entries = [self.entries[bucket] for bucket in buckets]
        programs = [asdict(entry) for entry in entries]
        manifest = {"schema": SCHEMA, **self._identity, "plan": self._plan.to_json(), "programs": programs}
        if library is not None:
            manifest["library_sha256"] = hashlib.sha256(library).hexdigest()
        text = json.dumps(manifest, indent=1, sort_keys=True).encode()
        kept = {f"{entry.key}.zst" for entry in entries}
        try:
            if library is not None:
                (self._work / LIBRARY).write_bytes(library)
                kept.add(LIBRARY)
            (self._work / MANIFEST).write_bytes(text)
            (self._work / SIGNATURE).write_bytes(self._key.sign(text))
            self._clear({*kept, MANIFEST, SIGNATURE})
            self._exchange()
        except OSError as error:
            raise self._cannot(error) from error

    def _exchange(self) -> None:
        self._work.chmod(0o755)
        if self._directory.exists():
            self._directory.rename(self._old)
        try:
            self._work.rename(self._directory)
        except OSError:
            if self._old.exists():
                self._old.rename(self._directory)
            raise
        shutil.rmtree(self._old, ignore_errors=True)

    def _take_over(self) -> None:
        """Find the finished programs of an earlier build of the same plan; everything else in the folder goes."""
        if not self._fresh:
            for bucket in self._plan.buckets():
                entry = self._finished(program_key(self._plan, bucket))
                if entry is not None:
                    self.entries[bucket] = entry
        names = [entry.key for entry in self.entries.values()]
        self._clear({f"{name}.{kind}" for name in names for kind in ("zst", "entry")})

    def _finished(self, name: str) -> StoreEntry | None:
        try:
            content, packed = ((self._work / f"{name}.{kind}").read_bytes() for kind in ("entry", "zst"))
        except FileNotFoundError:
            return None
        signature, message = content[:64], content[64:]
        if not verifies(self._key.public_key(), signature, message):
            return None
        document = json.loads(message)
        fields = document["entry"]
        right = document["identity"] == self._digest and fields["key"] == name
        if not right or hashlib.sha256(packed).hexdigest() != fields["sha256"]:
            return None
        return StoreEntry(name, fields["sha256"], fields["num_bytes"], ProgramCost(**fields["cost"]))

    def _message(self, entry: StoreEntry) -> bytes:
        return json.dumps({"identity": self._digest, "entry": asdict(entry)}, sort_keys=True).encode()

    def _clear(self, kept: set[str]) -> None:
        for path in self._work.iterdir():
            if path.name not in kept:
                path.unlink()

    def _cannot(self, error: OSError) -> StoreError:
        return StoreError(
            f"program store {self._directory} cannot be written: {error}; free space or choose another place"
        )
