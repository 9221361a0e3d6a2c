"""Plan: every decision that programs are compiled from, frozen and serialisable.

Owns the choice of the bucket lattice and the page count. Reads an architecture and a handful of settings; never imports
jax and never looks at the machine: what it needs to know of memory comes in as bytes.
"""

import hashlib
import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from pallas_kernels.platform import NATIVE_FEATURES
from planner import kv
from planner.architecture import ModelArchitecture
from planner.buckets import Bucket, Lattice, Phase, make_lattice
from planner.formats import Implementation, KvFormat, WeightForm
from planner.pages import SHARD_LEN, fullest
from planner.target import Target, find_target

PAGE_SIZES = (16, 32, 64, 128, 256, 512)
IMPLEMENTATIONS = {"cpu": ("xla", "native"), "cuda": ("pallas",)}
"""Code paths of a platform."""

MOVED_BYTES = 64 << 20
"""Bytes of one device that one launch moves between pool and host at most, unless a page alone is larger."""

MOST_MOVED = 8
"""Pages that one launch moves at most: each is an argument or a result of its own."""

_CODE_PATHS: dict[str, Implementation] = {"xla": "xla", "native": "native", "pallas": "pallas"}
_SMALLEST_CHUNK = 32
_CUT = ("q_heads", "ffw", "vocab")
"""Sizes of a model that devices must divide."""


class PlanError(ValueError):
    """Settings that cannot be planned; the message gives the value, the bound and what to change."""


class PoolError(PlanError):
    """A page pool that does not hold one sequence; ``kv_bytes`` is its size and ``needed_bytes`` what would do."""

    def __init__(self, kv_bytes: int, page_bytes: int, num_pages: int, needed: int, context: int) -> None:
        super().__init__(
            f"a page pool of {kv_bytes} bytes holds {num_pages} pages of {page_bytes} bytes; one sequence of {context} "
            f"tokens needs {needed}: raise the pool to {needed * page_bytes} bytes or lower the context"
        )
        self.kv_bytes = kv_bytes
        self.needed_bytes = needed * page_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What a node serves and with which static shapes. Lengths in tokens, ``prefill_budget`` in ids a step.

    ``implementation`` is the code path of the ops: ``xla`` runs on any CPU, ``native`` needs AVX512-VNNI and takes
    pages of bf16 numbers, and those of contexts that are spread over devices, through XLA; ``pallas`` is that of GPUs,
    where linear layers go through XLA and everything that touches pages or samples through Triton. Weights are cut over
    all ``devices``; the pages of a context lie on ``context_devices`` of them, and its key/value heads are cut over the
    rest. ``num_pages`` counts those of all context devices, each of which has the same number.
    """

    architecture: ModelArchitecture
    target: str
    weight_form: WeightForm
    kv_format: KvFormat
    context: int
    page_size: int
    num_pages: int
    slots: int
    lattice: Lattice
    prefill_budget: int
    implementation: Implementation = "xla"
    devices: int = 1
    context_devices: int = 1
    shard_len: int = SHARD_LEN
    """Positions that lie on one context device before the next one has its turn."""

    @property
    def model_devices(self) -> int:
        """Devices that the key/value heads of a page are cut over."""
        return self.devices // self.context_devices

    @property
    def shard_pages(self) -> int:
        """Pages of a shard."""
        return self.shard_len // self.page_size

    @property
    def served(self) -> ModelArchitecture:
        """The model as it is computed: its key/value heads are repeated where devices outnumber them."""
        return repeat_heads(self.architecture, self.devices)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, on one of the devices that its heads are cut over."""
        return kv.page_bytes(self.kv_format, self.served, self.page_size) // self.model_devices

    @property
    def attention(self) -> Implementation:
        """The code path of the ops that touch pages."""
        native = self.implementation == "native"
        through_xla = native and (self.kv_format is KvFormat.BF16 or self.context_devices > 1)
        return "xla" if through_xla else self.implementation

    @property
    def weights_by_layer(self) -> bool:
        """Whether programs take the weights of each layer as arrays of their own.

        For a GPU they do: XLA there copies a layer's weights out of a stack before it multiplies by them, which makes
        three times the traffic of what decoding is bound by.
        """
        return self.implementation == "pallas"

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.context // self.page_size)

    @property
    def moved_pages(self) -> int:
        """Pages that one launch moves between pool and host; 0 where contexts are spread, whose pages stay."""
        if self.context_devices > 1:
            return 0
        return max(1, min(MOST_MOVED, MOVED_BYTES // self.page_bytes))

    def buckets(self) -> tuple[Bucket, ...]:
        """The bucket of every program: the lattice, and those that are no step of a model."""
        others = [Bucket(phase, self.slots, 1, 1) for phase in (Phase.SET_SLOT, Phase.EMPTY)]
        if moved := self.moved_pages:
            others += [Bucket(phase, moved, 1, 1) for phase in (Phase.READ_PAGES, Phase.WRITE_PAGES)]
        return (*self.lattice.buckets(), *others)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; equal plans give equal documents."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Plan":
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing, unknown or of the wrong kind.
        """
        try:
            fields = dict(document)
            fields["architecture"] = ModelArchitecture.from_json(fields["architecture"])
            given: dict[str, Any] = fields["lattice"]
            sizes: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
            fields["lattice"] = Lattice(**sizes)
            fields["weight_form"] = WeightForm(fields["weight_form"])
            fields["kv_format"] = KvFormat(fields["kv_format"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a plan: {error}") from error

    def digest(self) -> str:
        """SHA-256 of the canonical document, hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def make_plan(
    architecture: ModelArchitecture,
    *,
    target: str,
    weight_form: WeightForm,
    kv_format: KvFormat,
    context: int,
    slots: int,
    prefill_chunk: int,
    prefill_slots: int,
    page_size: int,
    kv_bytes: int,
    implementation: str,
    devices: int = 1,
    context_devices: int = 1,
    shard_len: int = SHARD_LEN,
) -> Plan:
    """Choose the page count and the lattice.

    Args:
        architecture: the model.
        target: name of the target.
        weight_form: how linear layers hold their weights.
        kv_format: how pages hold keys and values.
        context: longest sequence, prompt and completion together; 0 = the model's own.
        slots: most sequences decoded at once.
        prefill_chunk: most prompt ids a step.
        prefill_slots: most prompt chunks a step.
        page_size: token positions a page.
        kv_bytes: bytes for the page pool of one device; 0 = room for every slot at full context, at most.
        implementation: code path of every op.
        devices: devices that weights are cut over.
        context_devices: devices that the pages of a context are spread over; a divisor of ``devices``.
        shard_len: positions of a shard, whole pages.

    Raises:
        PlanError: a setting is out of range, or the pool would not hold one sequence.
        UnknownTargetError: there is no target of that name.
    """
    context = context or architecture.context
    if not 1 <= context <= architecture.context:
        raise PlanError(
            f"context {context} is outside 1..{architecture.context}, the positions that the model was made for"
        )
    if page_size not in PAGE_SIZES:
        raise PlanError(f"page_size {page_size} is not one of {PAGE_SIZES}")
    if shard_len <= 0 or shard_len % page_size:
        raise PlanError(f"shard_len {shard_len} is no multiple of page_size {page_size}: shards are whole pages")
    if fault := (
        kv.fault(kv_format, architecture, page_size)
        or _target_fault(find_target(target), weight_form, kv_format, implementation, devices)
        or _device_fault(architecture, devices, context_devices)
        or _native_fault(architecture, kv_format, implementation)
    ):
        raise PlanError(fault)
    if not 1 <= slots <= 1024:
        raise PlanError(f"slots {slots} is outside 1..1024")
    if not _SMALLEST_CHUNK <= prefill_chunk <= 8192 or prefill_chunk % 16:
        raise PlanError(f"prefill_chunk {prefill_chunk} must be a multiple of 16 in {_SMALLEST_CHUNK}..8192")
    if not 1 <= prefill_slots <= prefill_chunk:
        raise PlanError(f"prefill_slots {prefill_slots} is outside 1..{prefill_chunk}, the prefill chunk")
    plan = Plan(
        architecture=architecture,
        target=target,
        weight_form=weight_form,
        kv_format=kv_format,
        context=context,
        page_size=page_size,
        num_pages=0,
        slots=slots,
        lattice=make_lattice(
            slots=slots,
            prefill_chunk=prefill_chunk,
            prefill_slots=prefill_slots,
            context=context,
            page_size=page_size,
            gpu=implementation == "pallas",
            one_width=implementation == "native" and kv_format is not KvFormat.BF16,
        ),
        prefill_budget=prefill_chunk,
        implementation=_CODE_PATHS[implementation],
        devices=devices,
        context_devices=context_devices,
        shard_len=shard_len,
    )
    return with_pool(plan, kv_bytes)


def with_pool(plan: Plan, kv_bytes: int) -> Plan:
    """The same plan with another number of pages.

    Args:
        plan: everything else.
        kv_bytes: bytes for the page pool of one device; 0 = room for every slot at full context, at most.

    Raises:
        PoolError: the pool would not hold one sequence.
    """
    needed = fullest(plan.table_width, plan.shard_pages, plan.context_devices)
    on_one = kv_bytes // plan.page_bytes if kv_bytes else plan.slots * needed
    if on_one < needed:
        raise PoolError(kv_bytes, plan.page_bytes, on_one, needed, plan.context)
    return replace(plan, num_pages=min(on_one, plan.slots * needed) * plan.context_devices)


def program_key(plan: Plan, bucket: Bucket) -> str:
    """The name of a program: everything that two programs of one store may differ in."""
    return f"{bucket.name}-{plan.kv_format}-{plan.weight_form}-d{plan.devices}-{plan.target}"


def repeat_heads(architecture: ModelArchitecture, devices: int) -> ModelArchitecture:
    """The same function with its key/value heads repeated until devices can share them evenly.

    Head h of the result is head ``h // repeats`` of the model; query heads stay as they are.
    """
    heads = math.lcm(architecture.kv_heads, devices)
    return architecture if heads == architecture.kv_heads else replace(architecture, kv_heads=heads)


def formats_for(architecture: ModelArchitecture, target: str) -> tuple[KvFormat, ...]:
    """The formats that a model can be held in on a target, most bits first.

    Raises:
        UnknownTargetError: there is no target of that name.
    """
    on_gpu = find_target(target).platform == "cuda"
    possible = [kv_format for kv_format in KvFormat if not (on_gpu and kv_format is KvFormat.FLOAT32)]
    return tuple(kv_format for kv_format in possible if not kv.fault(kv_format, architecture, PAGE_SIZES[-1]))


def default_implementation(
    architecture: ModelArchitecture, target: str, kv_format: KvFormat, cpu_features: Collection[str]
) -> Implementation:
    """The fastest code path: ``pallas`` on a GPU, ``native`` on a CPU that has what it needs, else ``xla``.

    Args:
        architecture: the model.
        target: name of the target.
        kv_format: how pages hold keys and values.
        cpu_features: instruction sets of the host that will serve.
    """
    if find_target(target).platform == "cuda":
        return "pallas"
    able = target == "cpu_native" and _native_attention_takes(architecture, kv_format)
    return "native" if able and set(cpu_features) >= NATIVE_FEATURES else "xla"


def _target_fault(
    target: Target, weight_form: WeightForm, kv_format: KvFormat, implementation: str, devices: int
) -> str:
    """Why a target cannot take a plan; empty if it can."""
    possible = IMPLEMENTATIONS[target.platform]
    if implementation not in possible:
        return f"implementation {implementation!r} is not one of {possible}, those of target {target.name}"
    if not 1 <= devices <= target.max_devices:
        return f"devices {devices} is outside 1..{target.max_devices}, those of a host with target {target.name}"
    if target.platform == "cuda" and kv_format is KvFormat.FLOAT32:
        return f"kv_format float32 is never built for a GPU such as {target.name}: use bf16"
    if target.platform == "cuda" and weight_form is not WeightForm.BF16:
        return f"weight_form {weight_form} is not built for a GPU such as {target.name}: use bf16"
    return ""


def _device_fault(architecture: ModelArchitecture, devices: int, context_devices: int) -> str:
    """Why a model cannot be cut over devices; empty if it can."""
    if not 1 <= context_devices <= devices or devices % context_devices:
        return f"context_devices {context_devices} is no divisor of devices {devices}: use one that divides them"
    if context_devices > 1 and any(architecture.windows):
        return (
            f"context_devices {context_devices}: a model with sliding windows is not spread by positions; "
            "use context_devices 1, which cuts it by heads"
        )
    for name in _CUT:
        if getattr(architecture, name) % devices:
            size = getattr(architecture, name)
            fitting = [n for n in range(1, 9) if all(getattr(architecture, part) % n == 0 for part in _CUT)]
            return f"devices {devices} do not divide the model's {name} {size}: use one of {fitting}"
    return ""


def _native_fault(architecture: ModelArchitecture, kv_format: KvFormat, implementation: str) -> str:
    if implementation == "native" and not _native_attention_takes(architecture, kv_format):
        return (
            f"implementation native needs a head_dim that 16 divides, this model has {architecture.head_dim}: "
            "use implementation xla"
        )
    return ""


def _native_attention_takes(architecture: ModelArchitecture, kv_format: KvFormat) -> bool:
    """Whether nothing keeps attention from the native code, or it goes through XLA anyway."""
    return kv_format is KvFormat.BF16 or architecture.head_dim % 16 == 0
