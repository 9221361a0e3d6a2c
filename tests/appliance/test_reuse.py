"""Greedy answers with pages reused are those without, over chats, equal beginnings and near-duplicates.

In formats that round, a chunk reads what is before it rounded and its own ids as they are, so that answers depend on
where prompts are cut. Chunks here are as short as they can be: every prompt is cut at the same places, reused or not.
"""

import random
from dataclasses import replace

import msgspec
import pytest

from appliance.config import ApplianceConfig, CacheConfig
from appliance.wiring import schedule_settings
from planner.architecture import ModelArchitecture
from planner.formats import KvFormat
from planner.plan import Plan
from planner.prefixes import PrefixSettings
from tests.support.spread_engine import MODEL, Answer, RandomModel, plan_of

TIE = 1e-3
"""Two ids less far apart in log-probability may change places, and then all that follows may differ."""

WINDOWED = replace(MODEL, windows=(24, 0))


def mixed_prompts(page: int, count: int) -> list[list[int]]:
    """Prompts of three kinds that begin like earlier ones, by any number of ids, full pages and single ids among it."""
    source = random.Random(5)
    ids = range(MODEL.vocab)
    system = source.choices(ids, k=2 * page)
    prompts = [[*system, *source.choices(ids, k=page // 2)]]
    while len(prompts) < count:
        base = source.choice(prompts)
        kept = source.choice([0, 1, page, 2 * page, source.randrange(len(base) + 1), len(base)])
        prompt = [*base[:kept], *source.choices(ids, k=source.randrange(1, page))]
        prompts.append(prompt[: MODEL.context - 20])
    return prompts


def assert_same(found: Answer, wanted: Answer) -> None:
    """Equal ids up to the first place where two of them are as good as equally likely."""
    for number, (here, there) in enumerate(zip(found.ids, wanted.ids, strict=True)):
        for place, (a, b) in enumerate(zip(here, there, strict=True)):
            if a != b:
                likely = wanted.top[number][place]
                assert abs(likely[a] - likely[b]) < TIE, f"answer {number} differs at {place}"
                break


def a_plan(kv_format: KvFormat, architecture: ModelArchitecture = MODEL) -> Plan:
    page = 128 if kv_format in (KvFormat.BMQ4, KvFormat.BMQ2) else 16
    plan = plan_of(architecture, kv_format=kv_format, page_size=page, slots=4)
    return replace(plan, lattice=replace(plan.lattice, prefill_chunks=(16,)))


@pytest.mark.parametrize(("kv_format", "count"), [(KvFormat.FLOAT32, 36), (KvFormat.INT8, 36), (KvFormat.BMQ4, 18)])
def test_answers_are_those_of_an_engine_that_reuses_nothing(kv_format: KvFormat, count: int) -> None:
    plan = a_plan(kv_format)
    model, prompts = RandomModel(plan), mixed_prompts(plan.page_size, count)
    wanted = model.answers(prompts, 6, reuse=False)
    assert wanted.cached == [0] * len(prompts)
    for every in (0, 5):  # all at once, and while others are computed or just have been
        found = model.answers(prompts, 6, every=every)
        assert sum(cached > 0 for cached in found.cached) >= 3
        assert_same(found, wanted)


def test_windows_only_mask_so_that_old_pages_serve() -> None:
    model = RandomModel(a_plan(KvFormat.INT8, WINDOWED))
    prompts = mixed_prompts(16, 12)
    assert_same(model.answers(prompts, 6, every=9), model.answers(prompts, 6, reuse=False))


def test_what_is_shared_follows_the_configuration_the_plan_and_the_model() -> None:
    plan, config = a_plan(KvFormat.FLOAT32), ApplianceConfig()

    def found(cache: CacheConfig, *model: str, plan: Plan = plan) -> PrefixSettings:
        return schedule_settings(plan, msgspec.structs.replace(config, cache=cache), model).prefixes

    default = found(CacheConfig(), "a")
    assert (default.reuse, default.all_tenants, default.lead, default.warm_up) == (True, False, 0, False)
    other = found(CacheConfig(prefix_reuse=False, share_prefixes="all", warmup_enabled=True), "a")
    assert (other.reuse, other.all_tenants, other.warm_up) == (False, True, True)
    assert found(CacheConfig(), "b").identity != default.identity == other.identity
    rounded = found(CacheConfig(), "a", plan=a_plan(KvFormat.BMQ4))
    assert rounded.lead == 16
    assert rounded.identity != default.identity
