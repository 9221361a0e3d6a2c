"""The placement of processes near their GPUs, on trees as the kernel writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.config import ApplianceConfig, EngineConfig, GpuConfig
from appliance.host.numa import Placement, choose, cpus_of, keep_to, read_topology
from appliance.lifecycle import place_near_gpu

CPUS = {0: "0-31,64-95", 1: "32-63,96-127"}
"""Of a host with two sockets of 32 cores, two threads each."""
GPUS = {
    "0000:07:00.0": 0, "0000:0f:00.0": 0, "0000:47:00.0": 0, "0000:4e:00.0": 0,
    "0000:87:00.0": 1, "0000:90:00.0": 1, "0000:b7:00.0": 1, "0000:bd:00.0": 1,
}  # fmt: skip
ALL = range(128)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Two sockets and eight GPUs, beside a network card, a display chip of another maker and a bridge of this one."""
    for node, cpus in CPUS.items():
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", cpus + "\n")
    devices = tmp_path / "sys/bus/pci/devices"
    irq = 200
    for address, node in GPUS.items():
        write(devices / address / "vendor", "0x10de\n")
        write(devices / address / "class", "0x030200\n")
        write(devices / address / "numa_node", f"{node}\n")
        for _ in range(2):
            write(devices / address / "msi_irqs" / str(irq), "msix\n")
            write(tmp_path / f"proc/irq/{irq}/effective_affinity_list", f"{32 * node + irq % 8}\n")
            irq += 1
    for address, vendor, kind in (
        ("0000:01:00.0", "0x15b3", "0x020700"), ("0000:02:00.0", "0x1a03", "0x030000"),
        ("0000:c4:00.0", "0x10de", "0x068000"),
    ):  # fmt: skip
        write(devices / address / "vendor", vendor + "\n")
        write(devices / address / "class", kind + "\n")
        write(devices / address / "numa_node", "0\n")
    return tmp_path


def test_the_host_is_read(host):
    topology = read_topology(host)
    assert topology.nodes == {
        0: frozenset([*range(32), *range(64, 96)]),
        1: frozenset([*range(32, 64), *range(96, 128)]),
    }
    assert [(gpu.address, gpu.node) for gpu in topology.gpus] == list(GPUS.items())
    assert topology.gpus[0].irqs == {200: {0}, 201: {1}}


@pytest.mark.parametrize(
    ("devices", "nodes", "shown"),
    [
        ([0], [0], "GPUs 0 on NUMA node 0, CPUs 0-31,64-95"),
        ([5], [1], "GPUs 5 on NUMA node 1, CPUs 32-63,96-127"),
        ([4, 5, 6, 7], [1], "GPUs 4-7 on NUMA node 1, CPUs 32-63,96-127"),
        (range(8), [0, 1], "GPUs 0-7 on NUMA node 0-1, CPUs 0-127"),
    ],
)
def test_processes_keep_to_the_node_of_their_gpus(host, devices, nodes, shown):
    topology = read_topology(host)
    placement = choose(topology, list(devices), ALL)
    assert placement == Placement(frozenset().union(*(topology.nodes[node] for node in nodes)), shown)


def test_a_cpu_set_is_kept(host):
    assert choose(read_topology(host), [0], range(16, 48)).cpus == frozenset(range(16, 32))


def test_a_cpu_set_far_from_the_gpu_is_a_fault(host):
    placement = choose(read_topology(host), [0], range(40, 48))
    assert placement.cpus == frozenset()
    ((fault, remedy),) = placement.faults
    assert fault == "none of the CPUs 0-31,64-95 near the GPUs may be used here, only 40-47"
    assert "cpuset" in remedy


def test_a_node_that_the_kernel_does_not_know_is_a_fault_where_there_are_several(host):
    write(host / "sys/bus/pci/devices/0000:07:00.0/numa_node", "-1\n")
    ((fault, remedy),) = choose(read_topology(host), [0], ALL).faults
    assert (fault, "firmware" in remedy) == ("the kernel does not know the NUMA node of 0000:07:00.0", True)
    (host / "sys/devices/system/node/node1/cpulist").unlink()
    (host / "sys/devices/system/node/node1").rmdir()
    assert choose(read_topology(host), [0], range(32)).cpus == frozenset(range(32))


def test_interrupts_on_the_other_socket_are_a_fault(host):
    write(host / "proc/irq/201/effective_affinity_list", "40\n")
    placement = choose(read_topology(host), [0, 1], ALL)
    assert placement.cpus, "the processes are placed all the same"
    assert placement.faults == (
        (
            "interrupts 201 of 0000:07:00.0 go to CPUs off its node 0",
            "echo 0-31,64-95 > /proc/irq/201/smp_affinity_list, or ban them in irqbalance",
        ),
    )


def test_a_gpu_that_is_not_there_is_a_fault(host):
    assert choose(read_topology(host), [7, 8], ALL).faults[0][0] == "GPU 8 of 8 does not exist"


def test_without_gpus_nothing_moves(host, tmp_path):
    assert choose(read_topology(host), [], range(4)) == Placement(
        frozenset(), "no GPU to be near; 2 NUMA nodes, 4 CPUs"
    )
    assert choose(read_topology(tmp_path / "nothing"), [], range(4)).cpus == frozenset()


@pytest.mark.parametrize(
    ("gpu", "engine", "evidence"),
    [
        ({}, {}, "no GPU to be near"),
        ({}, {"target": "a100_sxm_80", "devices": 2}, "GPUs 0-1 on NUMA node 0"),
        ({"device_id": 4}, {"target": "a100_sxm_80", "devices": 4}, "GPUs 4-7 on NUMA node 1"),
        ({}, {"target": "a100_sxm_80", "near_gpu": False}, "no GPU to be near"),
    ],
)
def test_the_configuration_says_which_gpus(host, gpu, engine, evidence):
    config = ApplianceConfig(gpu=GpuConfig(**gpu), engine=EngineConfig(**engine))
    placement = place_near_gpu(config, host)
    assert evidence in placement.evidence


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("0", [0]), ("0-2,5\n", [0, 1, 2, 5]), ("7,9-9", [7, 9])])
def test_lists_of_cpus(text, cpus):
    assert cpus_of(text) == frozenset(cpus)


def test_a_process_and_its_children_keep_to_the_cpus():
    program = (
        "import os, subprocess, sys\n"
        "from appliance.host.numa import Placement, keep_to\n"
        "keep_to(Placement(frozenset([min(os.sched_getaffinity(0))]), ''))\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(sorted(os.sched_getaffinity(0)))'], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"[{min(os.sched_getaffinity(0))}]\n"
    before = os.sched_getaffinity(0)
    keep_to(Placement(frozenset(), ""))
    assert os.sched_getaffinity(0) == before
