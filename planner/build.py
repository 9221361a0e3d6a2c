"""Plan to programs: compiles every bucket of a plan and writes the store. Runs on a build host, never while serving."""

import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jax.experimental import serialize_executable

from pallas_kernels import native
from pallas_kernels.compiled import CompileError
from planner.buckets import Bucket, Phase
from planner.memory import MemoryPlan, check, memory_plan
from planner.plan import Plan, program_key
from planner.program import Program, ProgramCost, SerialisedProgram, compile_program, compile_serialised
from planner.store import StoreError, open_store
from planner.store_writer import StoreWriter
from planner.target import Target, TargetHostError, find_target

Progress = Callable[[int, int, str], None]
"""Called with (done, total, name of the newest program)."""

_WIDER_THAN_AVX2 = re.compile(rb"\+(avx512\w*|avx10[.\w]*|avxvnni\w*|amx-[\w-]+)")
"""Instruction sets beyond AVX2 in the feature list that every CPU executable carries."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build made. ``compiled`` is 0 when the store was current already.

    ``temp_bytes`` are the most temporaries of a program, ``alias_fraction`` the least share of the donated state that a
    program updates in place.
    """

    directory: Path
    programs: int
    compiled: int
    memory: MemoryPlan
    max_arguments: int
    total_bytes: int
    temp_bytes: int
    alias_fraction: float


def build(
    plan: Plan,
    directory: Path,
    key: Ed25519PrivateKey,
    progress: Progress,
    *,
    force: bool = False,
    threads: int = 2,
    usable_bytes: int = 0,
) -> BuildReport:
    """Compile every program of a plan into a signed store, unless a current one is there.

    A build that was cut off goes on where it ended. Programs that do not keep to the memory plan are no store.

    Args:
        plan: what to compile.
        directory: where the store goes; an older one is replaced when the new one is whole.
        key: signs the manifest.
        progress: called after every program.
        force: compile everything even if the store is current.
        threads: compilations at once.
        usable_bytes: a bound on each device's memory below the target's own; 0 = none.

    Raises:
        StoreError: the store cannot be written.
        NativeBuildError: the native kernels cannot be compiled.
        TargetHostError: the process was not started for the target's instruction sets.
        MemoryPlanError: a program takes more memory than it may, or holds what it is given twice.
        CompileError: the compiler for cards is missing or refuses a program.
    """
    require_isa(find_target(plan.target))
    if not force:
        try:
            store = open_store(directory, plan, key.public_key())
            store.verify()
        except StoreError:
            pass
        else:
            costs = {bucket: store.entries[program_key(plan, bucket)].cost for bucket in plan.buckets()}
            return _report(plan, directory, costs, compiled=0)
    library = native.compile_library() if plan.implementation == "native" else None
    if library is not None:
        native.register(library)
    with StoreWriter(directory, plan, key, fresh=force) as writer:
        missing = [bucket for bucket in plan.buckets() if bucket not in writer.entries]
        before = len(writer.entries)
        for program in compiled(plan, missing, threads):
            writer.add(program)
            progress(len(writer.entries), before + len(missing), program.bucket.name)
        costs = {bucket: entry.cost for bucket, entry in writer.entries.items()}
        check(plan, costs, usable_bytes)
        writer.finish(library)
    return _report(plan, directory, costs, compiled=len(missing))


def require_isa(target: Target) -> None:
    """Check that XLA generates no wider instructions than the target allows.

    XLA reads its bound once, when a process makes its first client: it can be checked here, but not set.

    Raises:
        TargetHostError: a program compiled here would need more than the target promises.
    """
    if not target.max_isa:
        return
    probe = jax.jit(jnp.negative).lower(jax.ShapeDtypeStruct((16,), jnp.float32)).compile()
    payload: bytes = serialize_executable.serialize(probe)[0]
    wider = sorted({name.decode() for name in _WIDER_THAN_AVX2.findall(payload)})
    if wider:
        raise TargetHostError(
            f"target {target.name} is bound to {target.max_isa}, but programs compiled in this process may use "
            f"{', '.join(wider)}; start it with XLA_FLAGS=--xla_cpu_max_isa={target.max_isa}"
        )


def _report(plan: Plan, directory: Path, costs: Mapping[Bucket, ProgramCost], *, compiled: int) -> BuildReport:
    # the program that makes the state is given nothing to update
    updating = [cost for bucket, cost in costs.items() if bucket.phase is not Phase.EMPTY]
    workspace = max(cost.temp_bytes + cost.output_bytes - cost.alias_bytes for cost in updating)
    memory = memory_plan(plan, workspace)
    donated = memory.pages_bytes + memory.slots_bytes
    return BuildReport(
        directory=directory,
        programs=len(costs),
        compiled=compiled,
        memory=memory,
        max_arguments=max(cost.num_arguments for cost in updating),
        total_bytes=sum(file.stat().st_size for file in directory.iterdir()),
        temp_bytes=max(cost.temp_bytes for cost in costs.values()),
        alias_fraction=min(1.0, *(cost.alias_bytes / donated for cost in updating)),
    )


def compiled(plan: Plan, buckets: Sequence[Bucket], jobs: int) -> Iterator[SerialisedProgram]:
    """Compile buckets, several at once; programs come as they are ready.

    Raises:
        CompileError: the compiler for cards refuses a program, or a process that compiled was killed.
    """
    finished = False
    with _executor(plan, min(jobs, len(buckets))) as pool:
        running = [pool.submit(compile_serialised, plan, bucket) for bucket in buckets]
        try:
            for future in as_completed(running):
                yield future.result()
                running.remove(future)  # so that nothing holds what has been taken
            finished = True
        except BrokenProcessPool as error:
            raise CompileError(
                "a process that compiled was killed, probably for want of memory: take fewer --threads"
            ) from error
        finally:
            for child in [] if finished else multiprocessing.active_children():
                child.terminate()
            pool.shutdown(cancel_futures=True)


def _executor(plan: Plan, jobs: int) -> Executor:
    """Threads for a CPU; processes for cards, whose compiler does one thing at a time in each process."""
    if jobs <= 1 or find_target(plan.target).platform == "cpu":
        return ThreadPoolExecutor(max(1, jobs))
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _without_devices)


def _without_devices() -> None:
    """Begin a process that compiles for cards: it has none itself, and leaves Ctrl-C to the one that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jax.config.update("jax_platforms", "cpu")


def compile_all(plan: Plan, progress: Progress, threads: int) -> dict[Bucket, Program]:
    """Compile every bucket for this process and keep the programs."""
    buckets, programs = plan.buckets(), dict[Bucket, Program]()
    with ThreadPoolExecutor(threads) as pool:
        for program in pool.map(lambda bucket: compile_program(plan, bucket), buckets):
            programs[program.bucket] = program
            progress(len(programs), len(buckets), program.bucket.name)
    return programs
