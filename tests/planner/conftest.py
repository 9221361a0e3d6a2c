"""One tiny plan, compiled and stored once, for all tests of programs and stores."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True, slots=True)
class BuiltStore:
    """A store with its plan, the programs as they were compiled, its key and what the build reported."""

    directory: Path
    plan: object
    programs: Mapping[object, object]
    key: Ed25519PrivateKey
    calls: tuple[tuple[int, int, str], ...]


@pytest.fixture(scope="session")
def built_store(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    """Do not change it: copy it first."""
    from planner.architecture import ModelArchitecture
    from planner.build import compile_all
    from planner.formats import KvFormat, WeightForm
    from planner.plan import make_plan
    from planner.program import serialise
    from planner.store_writer import StoreWriter

    architecture = ModelArchitecture(
        family="llama", layers=2, embed=32, ffw=48, q_heads=4, kv_heads=2, head_dim=16, vocab=80, context=64,
        norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25, tied_embeddings=True,
    )  # fmt: skip
    plan = make_plan(
        architecture, target="cpu_native", weight_form=WeightForm.INT8, kv_format=KvFormat.FLOAT32, context=0, slots=1,
        prefill_chunk=32, prefill_slots=1, page_size=16, kv_bytes=0, implementation="xla",
    )  # fmt: skip
    calls: list[tuple[int, int, str]] = []
    programs = compile_all(plan, lambda *call: calls.append(call), 2)
    key = Ed25519PrivateKey.generate()
    directory = tmp_path_factory.mktemp("store") / "programs"
    with StoreWriter(directory, plan, key) as writer:
        for program in programs.values():
            writer.add(serialise(program))
        writer.finish(None)
    return BuiltStore(directory, plan, programs, key, tuple(calls))
