"""What ``zccp plan`` tells of a plan: memory, formats, sequences that fit, padding, and the path of a decision.

Owns the document and its form for people. Reads the mixes that travel with the benches; never imports jax.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from appliance.config import ApplianceConfig
from appliance.model.library import ModelLibrary
from appliance.model.record import read_record
from appliance.planning import free_bytes, plans_by_format, usable_bytes
from planner.architecture import ModelArchitecture
from planner.catalogue import find_architecture
from planner.decide import Terms, explain, terms_of
from planner.kv import bits_per_element
from planner.memory import LENGTHS, MemoryPlan, memory_plan, resident
from planner.mixes import Mix, Waste, simulate_all
from planner.plan import Plan

Document = dict[str, Any]


def committed_mixes() -> tuple[Mix, ...]:
    """The mixes that travel with the benches, by name."""
    files = [file for file in resources.files("appliance.bench.mixes").iterdir() if file.name.endswith(".json")]
    return tuple(
        Mix.from_json(file.name.removesuffix(".json"), json.loads(file.read_text()))
        for file in sorted(files, key=lambda file: file.name)
    )


def padding(plan: Plan) -> tuple[Waste, ...]:
    """What each committed mix pads under a plan, and all of them together."""
    return simulate_all(plan, committed_mixes())


def answer(
    config: ApplianceConfig, reference: str | None, *, context: int | None, output: int, free_gb: float | None
) -> Document:
    """What the verb was asked for.

    Args:
        config: the settings.
        reference: an architecture of the catalogue or the path of a ``config.json``; None = the configured model.
        context: ids of a context whose path is wanted; None = the whole plan.
        output: ids that may follow them.
        free_gb: free bytes of each device in units of 10^9; None = while nobody runs.

    Raises:
        PlanError: the settings cannot be planned.
        MemoryPlanError: the model does not fit on the target.
        UnknownArchitectureError: the reference names nothing.
        CatalogError: the configured model is not in the store.
    """
    if reference is not None:
        architecture = find_architecture(reference)
        name, model_context = reference, architecture.context
    else:
        record = read_record(ModelLibrary(config.home).folder(config.model.reference))
        name, architecture, model_context = record.name, record.read_architecture(), record.context
    if context is None:
        return {"model": name, **plan_document(config, architecture, model_context)}
    free = None if free_gb is None else int(free_gb * 1e9)
    return path_document(config, architecture, model_context, context_len=context, expected_output=output, free=free)


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    """A document for people."""
    return iter(document["path"]) if "path" in document else plan_lines(document)


def plan_document(config: ApplianceConfig, architecture: ModelArchitecture, model_context: int) -> Document:
    """Everything about the plan of a configuration, and about the formats that it could have.

    The plan is that of the format with the most bits that fits, which is the one that is served where none is named.

    Args:
        config: the settings.
        architecture: the model.
        model_context: the longest sequence that it may have.

    Raises:
        PlanError: the settings cannot be planned.
        MemoryPlanError: the model does not fit on the target.
    """
    formats = plans_by_format(config, architecture, model_context)
    plan, bound = next(plan for plan in formats.values() if isinstance(plan, Plan)), usable_bytes(config)
    return {
        **plan.to_json(),
        "parameters": architecture.parameters(),
        "programs": len(plan.buckets()),
        "memory": _memory(memory_plan(plan, usable_bytes=bound)),
        "formats": [
            _format(made, bound) if isinstance(made, Plan) else {"kv_format": str(kv_format), "fault": made}
            for kv_format, made in formats.items()
        ],
        "padding": [asdict(waste) for waste in padding(plan)],
    }


def path_document(
    config: ApplianceConfig,
    architecture: ModelArchitecture,
    model_context: int,
    *,
    context_len: int,
    expected_output: int,
    free: int | None,
) -> Document:
    """The path that a decision takes.

    Args:
        config: the settings.
        architecture: the model.
        model_context: the longest sequence that it may have.
        context_len: ids that are there.
        expected_output: ids that may come.
        free: bytes for pages on each device; None = while nobody runs.

    Raises:
        PlanError: the settings cannot be planned.
        MemoryPlanError: the model does not fit on the target.
    """
    terms = terms_for(config, architecture, model_context)
    given = free_bytes(terms) if free is None else free
    path = explain(terms, context_len, expected_output, given)
    return {"context_len": context_len, "expected_output": expected_output, "free_bytes": given, "path": list(path)}


def terms_for(config: ApplianceConfig, architecture: ModelArchitecture, model_context: int) -> Terms:
    """What decisions are made by under a configuration, over every format that it allows.

    Raises:
        PlanError: the settings cannot be planned.
        MemoryPlanError: the model does not fit on the target.
    """
    plans = plans_by_format(config, architecture, model_context).values()
    return terms_of(plan for plan in plans if isinstance(plan, Plan))


def plan_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """A plan for people; beside what ``plan_document`` has, the document names the model."""
    memory, lattice = document["memory"], document["lattice"]
    yield (
        f"{document['model']}, {document['parameters'] / 1e9:.2f} billion weights in {document['weight_form']}, on "
        f"{document['devices']} x {document['target']}"
    )
    if document["context_devices"] > 1:
        devices, shard_len = document["context_devices"], document["shard_len"]
        yield f"contexts spread over {devices} devices in shards of {shard_len} positions"
    yield (
        f"context {document['context']}, {document['slots']} slots, pages of {document['page_size']} positions, "
        f"code path {document['implementation']}"
    )
    yield ""
    yield from _aligned([["decode slots", _listed(lattice["decode_slots"])],
                         ["prefill chunks", _listed(lattice["prefill_chunks"])],
                         ["page-table widths", _listed(w * document["page_size"] for w in lattice["widths"])],
                         ["programs", str(document["programs"])]])  # fmt: skip
    yield ""
    yield f"memory of each device, GB, in {document['kv_format']}"
    parts = ("weights", "pages", "slots", "workspace", "total", "usable", "reserve")
    yield from _aligned([[part, _gigabytes(memory[f"{part}_bytes"])] for part in parts if memory[f"{part}_bytes"]])
    yield ""
    yield from _format_lines(document["formats"])
    yield ""
    yield "padding of what is computed, over the mixes that travel with the benches"
    header = ["mix", "mean", "p99", "launches", "left out"]
    rows = [[w["mix"], f"{w['mean']:.1%}", f"{w['p99']:.1%}", str(w["launches"]), str(w["refused"])]
            for w in document["padding"]]  # fmt: skip
    yield from _aligned([header, *rows])


def _format(plan: Plan, bound: int) -> Document:
    memory = memory_plan(plan, usable_bytes=bound)
    return {
        "kv_format": str(plan.kv_format),
        "bits": bits_per_element(plan.kv_format, plan.architecture.head_dim),
        "programs": len(plan.buckets()),
        "page_size": plan.page_size,
        "num_pages": plan.num_pages,
        "tokens": plan.num_pages * plan.page_size,
        "memory": _memory(memory),
        "resident": {str(length): resident(plan, length) for length in _lengths(plan)},
    }


def _lengths(plan: Plan) -> list[int]:
    """Positions of the sequences whose number is told: the usual ones below the longest, and the longest."""
    return [*(length for length in LENGTHS if length < plan.context), plan.context]


def _memory(memory: MemoryPlan) -> Document:
    return {**asdict(memory), "total_bytes": memory.total_bytes, "fits": memory.fits}


def _format_lines(formats: list[Document]) -> Iterator[str]:
    yield "sequences held at once, by positions each"
    good = [made for made in formats if "fault" not in made]
    header = ["format", "bits", *map(_thousands, good[0]["resident"]), "positions", "pages, GB"]
    yield from _aligned(
        [
            header,
            *(
                [
                    made["kv_format"],
                    f"{made['bits']:.2f}",
                    *(str(count) for count in made["resident"].values()),
                    str(made["tokens"]),
                    _gigabytes(made["memory"]["pages_bytes"]),
                ]
                for made in good
            ),
        ]
    )
    yield from (f"{made['kv_format']}: {made['fault']}" for made in formats if "fault" in made)


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _thousands(length: str) -> str:
    whole, rest = divmod(int(length), 1024)
    return length if rest else f"{whole}K"


def _listed(numbers: Any) -> str:
    return " ".join(map(str, numbers))


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
