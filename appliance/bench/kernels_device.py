"""The attention kernels on a GPU: whether their answers are right, and how fast they are beside what the card can do.

Loads jax. Checks every case on the card, then times it: medians over fresh random inputs, compilation apart, over data
that no cache holds. The yardsticks are measured in the same run: the bandwidth of a copy for decoding, the operations
of a large bf16 product for prefills. Needs a GPU of NVIDIA with compute capability 8.0 or more.
"""

import gc
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from appliance.bench.kernels_launches import Launch, launches
from appliance.bench.kernels_static import LONG_CONTEXT, no_such_case
from appliance.bench.report import Findings, Result, installed, measured
from appliance.bench.runner import BenchContext, BenchUseError
from appliance.bench.statistics import median

DECODE_BANDWIDTH, PREFILL_PEAK = 80.0, 55.0
"""Targets in percent, for an A100."""
TOLERANCE = 0.01
"""Of the worst row: the length of its error over its own. bf16 weights and results err by about 0.003."""
LEAST_CAPABILITY = 8.0
LONG_PREFILL = 2 * 10**10
"""Operations from which on a prefill counts for the figure: below, launches and the last wave of tiles decide."""
_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    ``chain_seconds`` is about what is timed at once, ``program_seconds`` the least of a program in it; ``repeats`` are
    medians of; ``pool_bytes`` is what a pool has at least.
    """

    copy_bytes: int = 2**30
    side: int = 8_192
    pool_bytes: int = 2**28
    chain_seconds: float = 0.02
    program_seconds: float = 5e-5
    repeats: int = 20
    most_steps: int = 1_000


@dataclass(frozen=True, slots=True)
class Gpu:
    """The card's own name and its compute capability, as ``8.0``."""

    kind: str
    capability: str


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """What the card does: bytes a second of a copy (read and written), operations a second of a bf16 product."""

    bytes_per_second: tuple[float, ...]
    flops_per_second: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timed:
    """One case: error of its worst row, and what it reached; None with the ``failure`` where it did not run."""

    kernel: str
    name: str
    counts: bool
    error: float | None = None
    against: str = ""
    seconds: float | None = None
    percent: float | None = None
    failure: str = ""

    @property
    def right(self) -> bool:
        """Whether it ran and its answer is close enough."""
        return self.error is not None and self.error <= TOLERANCE

    def line(self) -> str:
        """The case for people."""
        if self.error is None or self.seconds is None or self.percent is None:
            return f"{self.kernel} {self.name}: FAILED: {self.failure}"
        of = "of copy bandwidth" if self.kernel == "paged_decode" else "of the product's operations"
        verdict = "" if self.right else " WRONG,"
        return (
            f"{self.kernel} {self.name}:{verdict} error {self.error:.4f} against {self.against}, "
            f"{self.seconds * 1e6:.1f} us, {self.percent:.1f} % {of}"
        )


def run(context: BenchContext, only: str = "") -> Findings:
    """Check and time every case on the GPU, or those with ``only`` in their names.

    Raises:
        BenchUseError: there is no GPU that the kernels run on, or no case has such a name.
    """
    gpu, effort = find_gpu(), Effort()
    cases, found = [(name, make) for name, make in launches(effort.pool_bytes) if only in name], list[Timed]()
    if not cases:
        raise BenchUseError(no_such_case(only))
    with jax.default_device(jax.devices("gpu")[0]):
        context.progress("measuring what the card can do", 0, 0)
        yardsticks = measure_yardsticks(effort)
        for done, (name, make) in enumerate(cases):
            context.progress(f"running on {gpu.kind}", done, len(cases))
            found.append(attempt(name, make, yardsticks, effort))
            gc.collect()  # the pool of the last case, before the next one takes its place
    notes = (
        f"card: {gpu.kind}, compute capability {gpu.capability}",
        *(case.line() for case in found),
        f"percent of a case: median of {effort.repeats} chains of launches, each over new random inputs",
        "decode_bandwidth_pct, prefill_peak_pct: the least of the long cases; spread: the least and the largest",
    )
    return Findings(figures(found, yardsticks, is_a100="A100" in gpu.kind), notes, installed(_PACKAGES))


def find_gpu() -> Gpu:
    """The first GPU, which the kernels run on.

    Raises:
        BenchUseError: there is none, or it is too old.
    """
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        raise BenchUseError(
            "--device needs an NVIDIA GPU that jax can use, and finds none; on a machine that has one install "
            "jax-cuda12-plugin and jax-cuda12-pjrt of jax's version, elsewhere say --static"
        ) from error
    gpu = Gpu(str(device.device_kind), str(getattr(device, "compute_capability", "unknown")))
    if not re.fullmatch(r"\d+\.\d+", gpu.capability) or float(gpu.capability) < LEAST_CAPABILITY:
        raise BenchUseError(
            f"{gpu.kind} has compute capability {gpu.capability}; the kernels need {LEAST_CAPABILITY} or more"
        )
    return gpu


def measure_yardsticks(effort: Effort, clock: Callable[[], float] = time.perf_counter) -> Yardsticks:
    """The bandwidth of a copy and the operations of a product, one of each a repeat."""
    side, count = effort.side, effort.copy_bytes // 4

    def copies(key: Array) -> tuple[Array]:
        return (jax.random.normal(key, (count,), jnp.float32),)

    def factors(key: Array) -> tuple[Array, Array]:
        left, right = jax.random.normal(key, (2, side, side), jnp.bfloat16)
        return left, right * jnp.bfloat16(side**-0.5)

    def product(left: Array, right: Array) -> Array:
        return jnp.dot(left, right, preferred_element_type=jnp.float32).astype(left.dtype)

    # the barrier keeps the compiler from making one copy of two
    copying = chain_seconds(
        lambda _, x: jax.lax.optimization_barrier(-x), copies, 2e12, 2 * effort.copy_bytes, effort, clock
    )
    multiplying = chain_seconds(lambda _, a, b: product(a, b), factors, 3e14, 2 * side**3, effort, clock)
    return Yardsticks(
        tuple(2 * effort.copy_bytes / seconds for seconds in copying),
        tuple(2 * side**3 / seconds for seconds in multiplying),
    )


def attempt(name: str, make: Callable[[], Launch], yardsticks: Yardsticks, effort: Effort) -> Timed:
    """Check and time one case; a case that does not run is reported and ends nothing."""
    kernel, _, case = name.partition(" ")
    try:
        return time_launch(make(), yardsticks, effort)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return Timed(kernel, case, counts=False, failure=str(error).partition("\n")[0][:300])


def time_launch(
    launch: Launch, yardsticks: Yardsticks, effort: Effort, clock: Callable[[], float] = time.perf_counter
) -> Timed:
    """Check and time one case."""
    error = worst_error(launch)
    layers = launch.pages.shape[0]

    def step(index: Array, q: Array, k: Array, v: Array, pages: Array, *rest: Array) -> Array:
        return launch.run(q, k, v, pages, index % layers, *rest)

    def inputs(key: Array) -> tuple[Array, ...]:
        return (*launch.new(key), launch.pages, *launch.rest)

    decodes = launch.kernel == "paged_decode"
    amount, per_second = (
        (launch.least_bytes, yardsticks.bytes_per_second) if decodes else (launch.flops, yardsticks.flops_per_second)
    )
    reach = median(per_second)
    seconds = median(chain_seconds(step, inputs, reach, amount, effort, clock))
    counts = int(launch.rest[1].min()) >= LONG_CONTEXT if decodes else launch.flops >= LONG_PREFILL
    percent = 100 * amount / seconds / reach
    return Timed(launch.kernel, launch.name, counts, error, launch.against, seconds, percent)


def worst_error(launch: Launch) -> float:
    """The largest of all rows' errors, each the length of the error over the length of what it should be."""
    new, layer = launch.new(jax.random.key(3)), jnp.int32(launch.pages.shape[0] - 1)
    got = jax.jit(launch.run)(*new, launch.pages, layer, *launch.rest)
    with jax.default_matmul_precision("highest"):
        wide = [part.astype(jnp.float32) for part in new]
        wanted = jax.jit(launch.exact)(*wide, launch.pages, layer, *launch.rest)
    got, wanted = got[: launch.rows].astype(jnp.float32), wanted[: launch.rows]
    worst = (jnp.linalg.norm(got - wanted, axis=-1) / jnp.linalg.norm(wanted, axis=-1)).max()
    return float(jnp.where(jnp.isnan(worst), jnp.inf, worst))


def chain_seconds(
    step: Callable[..., Array],
    inputs: Callable[[Array], tuple[Array, ...]],
    per_second: float,
    amount: int,
    effort: Effort,
    clock: Callable[[], float],
) -> list[float]:
    """Seconds of one step, once a repeat.

    The result of a step is the first input of the next, so that none is left out. Programs are queued without waiting;
    one holds several steps where a step alone would be over before the host has queued the next program.

    Args:
        step: takes its index and the inputs.
        inputs: new ones from a key, made outside of what is timed.
        per_second: about how much a card does.
        amount: how much a step does.
        effort: how long and how often.
        clock: seconds.
    """
    at_best = max(amount, 1) / per_second
    inner = max(1, min(effort.most_steps, math.ceil(effort.program_seconds / at_best)))
    count = max(1, min(effort.most_steps, int(effort.chain_seconds / at_best / inner)))

    @jax.jit
    def program(begin: Array, first: Array, *others: Array) -> Array:
        if inner == 1:  # a loop would copy the result
            return step(begin, first, *others)
        return jax.lax.fori_loop(begin, begin + inner, lambda index, x: step(index, x, *others), first)

    def chain(first: Array, *others: Array) -> None:
        for begin in begins:
            first = program(begin, first, *others)
        first.block_until_ready()

    begins = [jnp.int32(index * inner) for index in range(count)]
    chain(*inputs(jax.random.key(4)))
    found = list[float]()
    for key in jax.random.split(jax.random.key(5), effort.repeats):
        fresh = jax.block_until_ready(inputs(key))
        begin = clock()
        chain(*fresh)
        found.append((clock() - begin) / (count * inner))
    return found


def figures(timed: Sequence[Timed], yardsticks: Yardsticks, *, is_a100: bool) -> tuple[Result, ...]:
    """The least percent of the long cases, with a target on an A100 alone; how many cases are wrong or failed."""
    wrong = [float(not case.right) for case in timed]
    found = [Result("cases_wrong", sum(wrong), "cases", len(timed), (min(wrong), max(wrong)), 0, "==")]
    for kernel, name, target in (
        ("paged_decode", "decode_bandwidth_pct", DECODE_BANDWIDTH),
        ("paged_prefill", "prefill_peak_pct", PREFILL_PEAK),
    ):
        percents = [
            case.percent for case in timed if case.kernel == kernel and case.counts and case.percent is not None
        ]
        if percents:
            aim = (target, ">=") if is_a100 else (None, None)
            ends = min(percents), max(percents)
            found.append(Result(name, min(percents), "%", len(percents), ends, *aim))
    errors = [case.error for case in timed if case.error is not None]
    if errors:
        found.append(
            Result("error_max", max(errors), "ratio", len(errors), (min(errors), max(errors)), TOLERANCE, "<=")
        )
    return (
        *found,
        measured("copy_bandwidth", [rate / 1e9 for rate in yardsticks.bytes_per_second], "GB/s"),
        measured("mma_peak", [rate / 1e12 for rate in yardsticks.flops_per_second], "TFLOP/s"),
    )
