"""A whole engine over a random model on any number of devices, asked for greedy ids and their log-probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from appliance.engine import Engine
from appliance.engine_ports import Arrival
from appliance.wiring import page_mover, program_set
from pallas_kernels.kv_layout import BASE_BITS
from planner.architecture import ModelArchitecture
from planner.build import compile_all
from planner.decoder import QUERY_ENERGY
from planner.formats import KvFormat, WeightForm
from planner.host_tier import HostTier, TierCounts
from planner.kv import energy_shape, lead_of
from planner.pages import PagePool
from planner.plan import Plan, make_plan
from planner.prefixes import PrefixSettings
from planner.program import empty_state, serving_devices
from planner.schedule import Scheduler
from planner.schedule_values import SchedulerSettings
from planner.sequence import Sampling
from planner.sequence import Sequence as Stream
from planner.sharding import Placement, place_energy, place_weight
from planner.weights import random_weights, weight_specs
from tests.support.engine_rig import ListGateway

MODEL = ModelArchitecture(
    family="llama", layers=2, embed=64, ffw=96, q_heads=16, kv_heads=8, head_dim=16, vocab=160, context=512,
    norm_eps=1e-6, rope_theta=10_000.0, query_scale=0.25,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids of each prompt, the log-probabilities of the likeliest ids at each position, and how many ids were reused.

    ``tier`` is what the host tier did.
    """

    ids: list[list[int]]
    top: list[list[dict[int, float]]]
    cached: list[int]
    tier: TierCounts


def plan_of(architecture: ModelArchitecture = MODEL, **changes: object) -> Plan:
    settings: dict[str, object] = {
        "target": "cpu_native", "weight_form": WeightForm.FLOAT32, "kv_format": KvFormat.FLOAT32, "context": 0,
        "slots": 2, "prefill_chunk": 64, "prefill_slots": 2, "page_size": 16, "kv_bytes": 0, "implementation": "xla",
    }  # fmt: skip
    plan = make_plan(architecture, **{**settings, **changes})  # type: ignore[arg-type]
    # one program a phase: what is computed does not depend on how many there are
    lattice = plan.lattice
    chunks, widths = lattice.prefill_chunks[-1:], lattice.widths[-1:]
    return replace(plan, lattice=replace(lattice, decode_slots=(plan.slots,), prefill_chunks=chunks, widths=widths))


def rounded_to_int8(weights: Mapping[str, np.ndarray], architecture: ModelArchitecture) -> dict[str, np.ndarray]:
    """The weight tree in the int8 form, rounded without any care."""
    found: dict[str, np.ndarray] = {}
    for name in weight_specs(architecture, WeightForm.INT8):
        kind, _, part = name.partition(".")
        source = weights[kind] if kind in weights else weights["embed"].T
        scale = np.abs(source).max(axis=-2) / 127 if part else 0.0
        found[name] = (
            {"codes": np.rint(source / scale[..., None, :]).astype(np.int8), "scale": scale}[part] if part else source
        )
    return found


class MovedBytes:
    """Sums up what a host tier copied."""

    def __init__(self) -> None:
        self.bytes = {"in": 0, "out": 0}

    def tier_moved(self, direction: str, num_bytes: int) -> None:
        self.bytes[direction] += num_bytes


class RandomModel:
    """A plan's programs, compiled, and random weights on its devices."""

    def __init__(self, plan: Plan, seed: int = 7) -> None:
        arch = plan.architecture
        placement = Placement.of(plan, serving_devices(plan))
        tree: Mapping[str, np.ndarray] = random_weights(arch, seed)
        if plan.weight_form is WeightForm.INT8:
            tree = rounded_to_int8(tree, arch)
        specs = weight_specs(arch, plan.weight_form)
        self.plan = plan
        self.weights = {name: place_weight(plan, spec, tree[name], placement) for name, spec in specs.items()}
        if plan.kv_format in BASE_BITS:
            energy = np.random.default_rng(seed).uniform(0.5, 2.0, energy_shape(arch)).astype(np.float32)
            self.weights[QUERY_ENERGY] = place_energy(plan, energy, placement)
        self.programs = compile_all(plan, lambda *_: None, 2)
        self.moved = MovedBytes()

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        reuse: bool = True,
        every: int = 0,
        host_pages: int = 0,
    ) -> Answer:
        """Step an engine until it has answered every prompt; they come all at once, or one ``every`` so many steps."""
        plan, vocab = self.plan, self.plan.architecture.vocab
        pool = PagePool(plan.num_pages, plan.page_size, plan.context_devices, plan.shard_pages)
        prefixes = PrefixSettings(reuse=reuse, lead=lead_of(plan.kv_format))
        tier = HostTier(host_pages, plan.moved_pages) if host_pages else None
        scheduler = Scheduler(plan.lattice, pool, SchedulerSettings(plan.prefill_budget, prefixes=prefixes), tier)
        gateway, state = ListGateway(), empty_state(self.programs)
        mover = page_mover(plan, host_pages, self.moved) if host_pages else None
        engine = Engine(self.weights, state, program_set(self.programs), scheduler, gateway, vocab=vocab, mover=mover)
        sampling = Sampling(max_tokens=new_tokens, temperature=0.0, top_logprobs=20)
        for key, prompt in enumerate(prompts):
            stream = Stream(key, f"r{key}", "t", list(prompt), len(prompt), sampling, arrival_s=0.0)
            gateway.inbox.append(Arrival((stream,)))
            for _ in range(every):
                engine.step()
        engine.step()
        while not engine.idle:
            engine.step()
            scheduler.check()
        assert pool.num_free == pool.num_pages
        engine.run(lambda: True)
        keys = range(len(prompts))
        # the first pair of a record is the id that was sampled
        top = [[dict(record[1:]) for record in gateway.logprobs[key]] for key in keys]
        cached = [gateway.finishes[key].cached_tokens for key in keys]
        return Answer([gateway.ids[key] for key in keys], top, cached, scheduler.reuse.tier)


def answers(plan: Plan, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int = 7) -> Answer:
    """What a random model under a plan answers to prompts that come all at once."""
    return RandomModel(plan, seed).answers(prompts, new_tokens)


def assert_equal(found: Answer, wanted: Answer, tolerance: float) -> None:
    """The same ids, and log-probabilities of the likeliest ids that are off by no more than a share of themselves."""
    assert found.ids == wanted.ids
    for here, there in zip(found.top, wanted.top, strict=True):
        for a, b in zip(here, there, strict=True):
            common = sorted(a.keys() & b.keys())
            assert len(common) >= 18, "only the last places may change"
            np.testing.assert_allclose([a[i] for i in common], [b[i] for i in common], rtol=tolerance, atol=tolerance)
