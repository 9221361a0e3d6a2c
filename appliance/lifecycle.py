"""The start and the end of ``zccp serve``: what a run takes of the host, around the node that serves.

Owns the order of taking and giving back: check the host, reserve the port, make the run's directory and the segments,
run the node (``appliance.node``) until it ends, remove all of it. Never imports jax.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from appliance.config import ApplianceConfig
from appliance.config_rules import host_problems
from appliance.handoff import directories
from appliance.host.numa import Placement, choose, keep_to, read_topology
from appliance.host.segments import remove_stale
from appliance.node import Commands, Node, Place
from appliance.reservation import StartError, make_run_directory, make_segments, reserve_port
from planner.target import DEFAULT_TARGET, find_target

__all__ = ["Commands", "StartError", "place_near_gpu", "serve"]

_log = structlog.get_logger("zccp.main")


def serve(
    config: ApplianceConfig,
    model: Path,
    commands: Commands | None = None,
    announce: Callable[[str], None] | None = None,
    reread: Callable[[], ApplianceConfig] | None = None,
) -> int:
    """Run the appliance until SIGTERM, SIGINT or a failure.

    Args:
        config: checked configuration.
        model: folder of the served model in the model store.
        commands: how children are started.
        announce: called with one line when everything is ready; the default writes it to standard error.
        reread: reads the configuration again for a reload and raises where it is wrong; the default gives ``config``.

    Returns:
        0 after a signal, 1 when a child failed.

    Raises:
        StartError: something the start needs is missing or taken.
        HandoffDirectoryError: what nginx and the workers share is not fit, or taken.
    """
    problems = host_problems(config, keys_present=config.keys_file.exists())
    if problems:
        raise StartError("\n".join(problems))
    for path in remove_stale():
        _log.info("removed the segments of a dead instance", file=str(path))
    placement = place_near_gpu(config)
    keep_to(placement)
    _log.info("placement", placed=placement.evidence, faults=[fault for fault, _ in placement.faults])
    with reserve_port(config.server.host, config.server.port) as reservation, directories(config.proxy):
        instance = f"{os.getpid()}-{secrets.token_hex(4)}"
        directory, lock = make_run_directory(config.run, instance)
        try:
            with make_segments(config, instance) as segments:
                place = Place(directory, reservation, model, segments.path)
                return Node(
                    config, place, commands or Commands(), announce or _to_stderr, reread or (lambda: config)
                ).run()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def place_near_gpu(config: ApplianceConfig, root: Path = Path("/")) -> Placement:
    """Where this configuration's processes belong on this host; children and shared memory follow the main process."""
    on_gpu = find_target(config.engine.target or DEFAULT_TARGET).card and config.engine.near_gpu
    first = config.gpu.device_id
    devices = range(first, first + config.engine.devices) if on_gpu else range(0)
    return choose(read_topology(root), devices, os.sched_getaffinity(0))


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
