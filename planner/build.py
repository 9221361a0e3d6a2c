"""Plan to programs: compiles every bucket of a plan and writes the store. Runs on a build host, never while serving."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pallas_kernels import native
from planner.buckets import Bucket
from planner.memory import MemoryPlan, memory_plan
from planner.plan import Plan
from planner.program import Program, compile_program
from planner.store import StoreError, open_store, write_store

Progress = Callable[[int, int, str], None]
"""Called with (done, total, name of the newest program)."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build made. ``compiled`` is 0 when the store was current already."""

    directory: Path
    programs: int
    compiled: int
    memory: MemoryPlan
    max_arguments: int
    total_bytes: int


def build(
    plan: Plan, directory: Path, key: Ed25519PrivateKey, progress: Progress, *, force: bool = False, threads: int = 2
) -> BuildReport:
    """Compile every program of a plan into a signed store, unless a current one is there.

    Args:
        plan: what to compile.
        directory: where the store goes; an older one is replaced when the new one is whole.
        key: signs the manifest.
        progress: called after every program.
        force: compile even if the store is current.
        threads: compilations at once.

    Raises:
        StoreError: the store cannot be written.
        NativeBuildError: the native kernels cannot be compiled.
    """
    if not force:
        try:
            store = open_store(directory, plan, key.public_key())
            store.verify()
        except StoreError:
            pass
        else:
            costs = [entry.cost for entry in store.entries.values()]
            return BuildReport(
                directory=directory,
                programs=len(costs),
                compiled=0,
                memory=memory_plan(plan, max(cost.temp_bytes for cost in costs)),
                max_arguments=max(cost.num_arguments for cost in costs),
                total_bytes=sum(entry.num_bytes for entry in store.entries.values()),
            )
    library = native.compile_library() if plan.implementation == "native" else None
    if library is not None:
        native.register(library)
    programs = compile_all(plan, progress, threads)
    write_store(directory, plan, programs, library, key)
    costs = [program.cost for program in programs.values()]
    return BuildReport(
        directory=directory,
        programs=len(programs),
        compiled=len(programs),
        memory=memory_plan(plan, max(cost.temp_bytes for cost in costs)),
        max_arguments=max(cost.num_arguments for cost in costs),
        total_bytes=sum(file.stat().st_size for file in directory.iterdir()),
    )


def compile_all(plan: Plan, progress: Progress, threads: int) -> dict[Bucket, Program]:
    """Compile every bucket, several at once."""
    buckets = plan.buckets()
    programs: dict[Bucket, Program] = {}
    with ThreadPoolExecutor(threads) as pool:
        running = {pool.submit(compile_program, plan, bucket): bucket for bucket in buckets}
        for future in as_completed(running):
            bucket = running[future]
            programs[bucket] = future.result()
            progress(len(programs), len(buckets), bucket.name)
    return {bucket: programs[bucket] for bucket in buckets}
