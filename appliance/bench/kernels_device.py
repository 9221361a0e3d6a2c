"""The kernels on a GPU: whether their answers are right, and how fast they are beside what the card can do.

Loads jax. Checks every case on the card, then times it: medians over fresh random inputs, compilation apart, over pools
that no cache holds. The yardsticks are measured in the same run: the bandwidth of a copy for decoding, sampling and
writes, the operations of a large bf16 product for prefills. Needs a GPU of NVIDIA with compute capability 8.0 or more.
"""

import functools
import gc
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from appliance.bench.kernels_checks import TOLERANCE
from appliance.bench.kernels_launches import Launch, Yardstick, launches
from appliance.bench.kernels_static import KERNELS, no_such_case
from appliance.bench.report import Findings, Result, installed, measured
from appliance.bench.runner import BenchContext, BenchUseError
from appliance.bench.statistics import median
from pallas_kernels.paged_decode.cases import PAIR_64K

DECODE_BANDWIDTH, PREFILL_PEAK, BMQ4_SPEEDUP = 80.0, 55.0, 2.0
"""Targets for an A100: percent, percent, and bf16's seconds over bmq4's."""
LEAST_CAPABILITY = 8.0
_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    ``chain_seconds`` is about what is timed at once, ``program_seconds`` the least of a program in it; ``repeats`` are
    medians of; ``pool_bytes`` is what a pool of attention has at least; no launch is over in ``launch_seconds``.
    """

    copy_bytes: int = 2**30
    side: int = 8_192
    pool_bytes: int = 2**28
    chain_seconds: float = 0.02
    program_seconds: float = 5e-5
    launch_seconds: float = 2e-6
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

    def reach(self, of: Yardstick) -> float:
        """The median of what a case is held against; a copy writes half of what it moves."""
        if of == "of the product's operations":
            return median(self.flops_per_second)
        return median(self.bytes_per_second) / (2 if of == "of what a copy writes" else 1)


@dataclass(frozen=True, slots=True)
class Timed:
    """One case: whether its answer is right, and what it reached; without ``seconds`` the ``failure`` says why.

    ``seconds`` are those of a step, once a repeat; ``rate`` is what it did in a second.
    """

    kernel: str
    name: str
    counts: bool
    right: bool = False
    error: float | None = None
    verdict: str = ""
    seconds: tuple[float, ...] = ()
    rate: float = 0.0
    percent: float = 0.0
    of: Yardstick = "of copy bandwidth"
    failure: str = ""

    def line(self) -> str:
        """The case for people."""
        if not self.seconds:
            return f"{self.kernel} {self.name}: FAILED: {self.failure}"
        rate = f"{self.rate / 1e12:.1f} TFLOP/s" if self.kernel == "paged_prefill" else f"{self.rate / 1e9:.1f} GB/s"
        wrong = "" if self.right else " WRONG,"
        return (
            f"{self.kernel} {self.name}:{wrong} {self.verdict}, {median(self.seconds) * 1e6:.1f} us, "
            f"{rate}, {self.percent:.1f} % {self.of}"
        )


def run(context: BenchContext, only: str = "") -> Findings:
    """Check and time every case on the GPU, or those with ``only`` in their names.

    Raises:
        BenchUseError: there is no GPU that the kernels run on, or no case has such a name.
    """
    gpu, effort = find_gpu(), Effort()
    cases, found = [(name, make) for name, make in launches(effort.pool_bytes) if only in name], list[Timed]()
    if not cases:
        raise BenchUseError(no_such_case(only, KERNELS))
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
        "bytes: keys and values in the pool's format, for page_write what it writes, for sample the logits once",
        "decode_bandwidth_pct, prefill_peak_pct: the least of the long cases; spread: the least and the largest",
        "bmq4_speedup_64k: seconds of bf16 over those of bmq4, one shape; spread: worst against best",
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
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a card raises, the other cases go on
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        return Timed(kernel, case, counts=False, failure=reason)


def time_launch(
    launch: Launch, yardsticks: Yardsticks, effort: Effort, clock: Callable[[], float] = time.perf_counter
) -> Timed:
    """Check and time one case."""
    checked, reach = launch.check(), yardsticks.reach(launch.of)
    seconds = chain_seconds(launch.step, launch.inputs, reach, launch.amount, effort, clock, donates=launch.donates)
    rate = launch.amount / median(seconds)
    return Timed(
        kernel=launch.kernel,
        name=launch.name,
        counts=launch.counts,
        right=checked.right,
        error=checked.error,
        verdict=checked.text,
        seconds=tuple(seconds),
        rate=rate,
        percent=100 * rate / reach,
        of=launch.of,
    )


def chain_seconds(
    step: Callable[..., Any],
    inputs: Callable[[Array], tuple[Any, ...]],
    per_second: float,
    amount: int,
    effort: Effort,
    clock: Callable[[], float],
    *,
    donates: bool = False,
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
        donates: a step takes its first input's place.
    """
    at_best = max(amount / per_second, effort.launch_seconds)
    inner = max(1, min(effort.most_steps, math.ceil(effort.program_seconds / at_best)))
    count = max(1, min(effort.most_steps, int(effort.chain_seconds / at_best / inner)))

    @functools.partial(jax.jit, donate_argnums=1 if donates else ())
    def program(begin: Array, first: Any, *others: Any) -> Any:
        if inner == 1:  # a loop would copy the result
            return step(begin, first, *others)
        return jax.lax.fori_loop(begin, begin + inner, lambda index, x: step(index, x, *others), first)

    def chain(first: Any, *others: Any) -> None:
        for begin in begins:
            first = program(begin, first, *others)
        jax.block_until_ready(first)

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
    """Figures of the long cases that are right, with targets on an A100 alone; how many cases are wrong or failed."""
    wrong = [float(not case.right) for case in timed]
    found = [Result("cases_wrong", sum(wrong), "cases", len(timed), (min(wrong), max(wrong)), 0, "==")]
    for kernel, name, target in (
        ("paged_decode", "decode_bandwidth_pct", DECODE_BANDWIDTH),
        ("paged_prefill", "prefill_peak_pct", PREFILL_PEAK),
    ):
        percents = [case.percent for case in timed if case.kernel == kernel and case.counts and case.right]
        if percents:
            aim = (target, ">=") if is_a100 else (None, None)
            ends = min(percents), max(percents)
            found.append(Result(name, min(percents), "%", len(percents), ends, *aim))
    found += _speedup(timed, is_a100=is_a100)
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


def _speedup(timed: Sequence[Timed], *, is_a100: bool) -> list[Result]:
    """How much faster bmq4 is over 64K positions, where both of the pair are right."""
    seconds = {case.name: case.seconds for case in timed if case.kernel == "paged_decode" and case.right}
    plain, coded = (seconds.get(case.name) for case in PAIR_64K)
    if plain is None or coded is None:
        return []
    ends = min(plain) / max(coded), max(plain) / min(coded)
    aim = (BMQ4_SPEEDUP, ">=") if is_a100 else (None, None)
    return [Result("bmq4_speedup_64k", median(plain) / median(coded), "ratio", len(plain), ends, *aim)]
