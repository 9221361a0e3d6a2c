"""The training process: reads a history, trains the LSTM on it, writes the model, ends.

Owns what keeps it from being felt: it runs only when a CPU has nothing else to do, on a bounded amount of CPU time, and
the kernel takes it first when memory runs out. It sees no accelerator; its environment says so. jax compiles here and
not in the engine process, so nothing is ever compiled where requests are served.
"""

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from appliance.host.process import die_with_parent
from appliance.prediction_state import PredictionState, StateError, load, save

CPU_LIMIT_S = 300
"""CPU time after which the kernel ends a training; one takes a few seconds."""


def main(argv: list[str]) -> int:
    """Train.

    Args:
        argv: program, file to read, file to write, served model, process id of the parent.

    Returns:
        0, or 1 with the reason on standard error.
    """
    source, destination, model, parent = Path(argv[1]), Path(argv[2]), argv[3], int(argv[4])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _step_back()
    from planner.predict import train  # noqa: PLC0415 - loads jax, and it should do so at low priority

    try:
        state = load(source, model)
        if state is None:
            raise StateError(f"{source} is missing")
        trained = train(state.history, seed=state.history.total)
        save(destination, PredictionState(model, state.history, trained))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _step_back() -> None:
    """Yield CPU and memory to everybody else, as far as the system allows."""
    os.nice(19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
