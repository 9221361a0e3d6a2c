"""From configuration and model record to the plan and to the places on disk that belong to it.

Owns the defaults of the engine section and the layout of the state directory beside the models. Read by the main
process, the engine, the builder and, for the context length, by workers; never imports jax.
"""

from dataclasses import dataclass
from pathlib import Path

from appliance.config import ApplianceConfig
from appliance.host.segments import SEGMENT_TOKENS
from appliance.model.record import ModelRecord, ModelRecordError, read_record
from planner.architecture import ModelArchitecture
from planner.formats import KvFormat, WeightForm
from planner.plan import Plan, make_plan

DEFAULT_TARGET = "cpu_native"
DEFAULT_SLOTS = 16
DEFAULT_PREFILL_CHUNK = 512
DEFAULT_PREFILL_ROWS = 4
DEFAULT_PAGE_SIZE = 64
DEFAULT_KV_BYTES = 2 << 30
"""Size of the page pool where none is configured, raised to hold one sequence of full length."""


class ModelMissingError(RuntimeError):
    """The configured model is not in the store; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of the store: its folder and its record."""

    folder: Path
    record: ModelRecord


def models_directory(home: Path) -> Path:
    """Where the model store lies."""
    return home / "models"


def stored_models(home: Path) -> list[StoredModel]:
    """Every readable model of the store, by name; a damaged one is left out."""
    found: list[StoredModel] = []
    directory = models_directory(home)
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        try:
            found.append(StoredModel(folder, read_record(folder)))
        except ModelRecordError:
            continue
    return found


def find_model(home: Path, reference: str) -> StoredModel:
    """The stored model of that name, or the one that was fetched from that reference.

    Raises:
        ModelMissingError: there is none.
    """
    models = stored_models(home)
    for wanted in (lambda m: m.record.name == reference, lambda m: m.record.reference == reference):
        for model in models:
            if wanted(model):
                return model
    names = ", ".join(model.record.name for model in models) or "none"
    raise ModelMissingError(
        f"model {reference!r} is not in the store {models_directory(home)} (stored: {names});"
        f" fetch it with: zccp models pull {reference}"
    )


def store_directory(home: Path, model: StoredModel) -> Path:
    """Where the programs of a model lie."""
    return home / "programs" / model.folder.name


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
    context = served_context(config, record)
    kv_format = KvFormat(engine.kv_format or KvFormat.FLOAT32)
    return make_plan(
        architecture,
        target=engine.target or DEFAULT_TARGET,
        weight_form=WeightForm(engine.weight_form or WeightForm.INT8),
        kv_format=kv_format,
        context=context,
        slots=engine.slots or DEFAULT_SLOTS,
        prefill_chunk=engine.prefill_chunk or DEFAULT_PREFILL_CHUNK,
        prefill_slots=engine.prefill_rows or DEFAULT_PREFILL_ROWS,
        page_size=config.page_size or DEFAULT_PAGE_SIZE,
        kv_bytes=engine.kv_memory_mb << 20 if engine.kv_memory_mb else _default_kv_bytes(architecture, context),
    )


def served_context(config: ApplianceConfig, record: ModelRecord) -> int:
    """Prompt and completion ids together that a request may have."""
    return min(config.engine.context or record.context, SEGMENT_TOKENS)


def _default_kv_bytes(architecture: ModelArchitecture, context: int) -> int:
    """At least one sequence of full length, rounded up by the largest page, in the widest format."""
    return max(DEFAULT_KV_BYTES, int(architecture.kv_bytes_per_token(4) * (context + 512)))
