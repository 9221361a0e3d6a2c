"""Card: what a GPU holds, how many copies of a kernel fit on it, and its description for the compiler.

Owns the rules of occupancy. Reads the JSON files of ``pallas_kernels.cards``; never imports jax.
Source: CUDA C++ Programming Guide, tables of compute capabilities; the form of XLA's GpuTargetConfigProto.
"""

import json
from dataclasses import dataclass
from importlib import resources

MULTIPROCESSORS = 108
"""Of the card that launches are sized for; another card runs the same programs less evenly."""

_WARP = 32
_WARPS_TOGETHER = 4  # warps of a block get registers by schedulers, of which there are four
_REGISTERS_TOGETHER = 256  # of a warp
_SHARED_RESERVED = 1024  # bytes of every block that the system takes
_SHARED_BY_DEFAULT = 49_152
_PLENTY = 4
"""Times the memory that a card has, as the compiler is told. It counts donated arguments twice and would compute
hundreds of values again in every program to save what it cannot; what programs take is checked when they are built."""
_TOOLKIT = (12, 9)  # whose compiler the extra ``aot`` brings


class UnknownCardError(ValueError):
    """No card of that name; the message lists those there are."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU; sizes in bytes, ``clock_ghz`` in GHz. ``source`` says where the numbers come from."""

    name: str
    description: str
    source: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    registers_per_multiprocessor: int
    shared_bytes_per_multiprocessor: int
    shared_bytes_per_block: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    fpus_per_multiprocessor: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_second: int

    @property
    def architecture(self) -> str:
        """The name that the assembler knows, as ``sm_80``; from 9.0 on with the instructions of that chip alone."""
        return "sm_{}{}{}".format(*self.compute_capability, "a" if self.compute_capability >= (9, 0) else "")

    def blocks(self, *, registers: int, threads: int, shared_bytes: int) -> int:
        """How many blocks run on one multiprocessor at once.

        Args:
            registers: of a thread.
            threads: of a block.
            shared_bytes: of a block, as the kernel asks for.
        """
        warps = -(-threads // _WARP)
        warp_registers = -(-registers * _WARP // _REGISTERS_TOGETHER) * _REGISTERS_TOGETHER
        warps_by_registers = self.registers_per_multiprocessor // warp_registers // _WARPS_TOGETHER * _WARPS_TOGETHER
        return min(
            warps_by_registers // warps,
            self.threads_per_multiprocessor // (warps * _WARP),
            self.shared_bytes_per_multiprocessor // (shared_bytes + _SHARED_RESERVED),
            self.blocks_per_multiprocessor,
        )

    def target_config(self) -> str:
        """The card as XLA's compiler takes it, a GpuTargetConfigProto in text form."""
        major, minor = self.compute_capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": _WARP,
            "shared_memory_per_block": _SHARED_BY_DEFAULT,
            "shared_memory_per_block_optin": self.shared_bytes_per_block,
            "shared_memory_per_core": self.shared_bytes_per_multiprocessor,
            "threads_per_core_limit": self.threads_per_multiprocessor,
            "core_count": self.multiprocessors,
            "fpus_per_core": self.fpus_per_multiprocessor,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "memory_bandwidth": self.memory_bytes_per_second,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": _PLENTY * self.memory_bytes,
            "registers_per_core_limit": self.registers_per_multiprocessor,
            "registers_per_block_limit": self.registers_per_multiprocessor,
        }
        return "\n".join(
            (
                "gpu_device_info {",
                *(f"  {key}: {value}" for key, value in device.items()),
                f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
                "}",
                'platform_name: "CUDA"',
                "dnn_version_info { major: 9 minor: 8 }",
                "runtime_version {{ major: {} minor: {} }}".format(*_TOOLKIT),
                f'device_description_str: "{self.description}"',
            )
        )


def card_names() -> tuple[str, ...]:
    """All cards, sorted."""
    files = resources.files("pallas_kernels.cards").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def find_card(name: str) -> Card:
    """The card of that name.

    Raises:
        UnknownCardError: there is none.
    """
    if name not in card_names():
        raise UnknownCardError(f"card {name!r} is unknown; cards: {', '.join(card_names())}")
    data = json.loads(resources.files("pallas_kernels.cards").joinpath(f"{name}.json").read_text())
    major, minor = data.pop("compute_capability")
    return Card(name=name, compute_capability=(major, minor), **data)
