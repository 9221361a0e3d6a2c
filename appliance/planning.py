"""From configuration and model record to the plan and to the places on disk that belong to it.

Owns the defaults of the engine section and the layout of the state directory beside the models. Read by the main
process, the engine and the builder; never imports jax.
"""

from pathlib import Path

from appliance.config import ApplianceConfig
from appliance.model.record import ModelRecord
from pallas_kernels.platform import cpu_features
from planner.architecture import ModelArchitecture
from planner.formats import KvFormat, WeightForm
from planner.kv import BASE_BITS
from planner.plan import Plan, default_implementation, make_plan

DEFAULT_TARGET = "cpu_native"
DEFAULT_SLOTS = 16
DEFAULT_PREFILL_CHUNK = 512
DEFAULT_PREFILL_ROWS = 4
DEFAULT_PAGE_SIZE = 64
DEFAULT_BITMASK_PAGE_SIZE = 128
"""The bitmask formats round blocks of 128 positions, and a page holds whole blocks."""
DEFAULT_KV_BYTES = 2 << 30
"""Size of the page pool where none is configured, raised to hold one sequence of full length."""


def store_directory(home: Path, folder: Path, plan: Plan) -> Path:
    """Where the programs of the model in ``folder`` lie.

    Each target, weight form, page format and code path has a place of its own, so that building one keeps the others.
    """
    kind = f"{plan.target}-{plan.weight_form}-{plan.kv_format}-{plan.implementation}"
    return home / "programs" / folder.name / kind


def signing_key_file(home: Path) -> Path:
    """The private key that signs locally built stores."""
    return home / "signing-key.pem"


def plan_for(config: ApplianceConfig, record: ModelRecord) -> Plan:
    """The plan of a configuration for a model.

    Raises:
        PlanError: the settings cannot be planned.
    """
    engine = config.engine
    architecture = record.read_architecture()
    context = config.context_of(record.context)
    kv_format = KvFormat(engine.kv_format or KvFormat.FLOAT32)
    target = engine.target or DEFAULT_TARGET
    return make_plan(
        architecture,
        target=target,
        weight_form=WeightForm(engine.weight_form or WeightForm.INT8),
        kv_format=kv_format,
        context=context,
        slots=engine.slots or DEFAULT_SLOTS,
        prefill_chunk=engine.prefill_chunk or DEFAULT_PREFILL_CHUNK,
        prefill_slots=engine.prefill_rows or DEFAULT_PREFILL_ROWS,
        page_size=config.page_size or (DEFAULT_BITMASK_PAGE_SIZE if kv_format in BASE_BITS else DEFAULT_PAGE_SIZE),
        kv_bytes=engine.kv_memory_mb << 20 if engine.kv_memory_mb else _default_kv_bytes(architecture, context),
        implementation=engine.implementation or default_implementation(architecture, target, kv_format, cpu_features()),
    )


def _default_kv_bytes(architecture: ModelArchitecture, context: int) -> int:
    """At least one sequence of full length, rounded up by the largest page, in the widest format."""
    return max(DEFAULT_KV_BYTES, int(architecture.kv_bytes_per_token(4) * (context + 512)))
