"""The two stacks of the bench old-stack, each as one thing to start, to load and to weigh.

Owns how the old one is put together: nginx, Gunicorn with synchronous workers, Flask, ``transformers`` on torch. The
other one is the appliance. Knows no clock.
"""

import os
import pwd
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from appliance.bench.runner import BenchError, BenchUseError
from appliance.bench.served import SERVE, end, free_port, scratch_folder, serving, wait_until_ready
from appliance.config import ApplianceConfig
from appliance.config_proxy import ProxyConfig
from appliance.host.segments import SHARED_MEMORY
from appliance.model.record import read_record
from appliance.nginx import nginx_config

HERE = Path(__file__).parent
LOAD_S = 600.0
"""Time that Flask workers get to import torch and load the model."""
NGINX_PLACES = "/usr/sbin:/usr/local/sbin:/usr/bin"
_NULL_APPLIANCE = ("tests.bench.null_engine", "serve")


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack: the port of its front and the processes that began it."""

    name: str
    port: int
    roots: tuple[int, ...]

    def pss_bytes(self) -> int:
        """Proportional set size of all its processes together: what it takes of the machine's memory.

        Raises:
            BenchError: one of the first processes has ended.
        """
        try:
            roots = [psutil.Process(pid) for pid in self.roots]
            processes = [process for root in roots for process in (root, *root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise BenchError(f"a process of the {self.name} stack has ended: {error}") from error
        total = 0
        for process in processes:
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return total


def find_nginx() -> str:
    """The path of nginx.

    Raises:
        BenchUseError: it is not installed.
    """
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:{NGINX_PLACES}")  # noqa: TID251
    if found is None:
        raise BenchUseError("nginx is not installed; install it (Debian: apt-get install nginx-light)")
    return found


@contextmanager
def old_stack(model: Path, workers: int, *, null: bool) -> Iterator[Stack]:
    """Start the stack that is replaced.

    Args:
        model: folder of the model in the model store.
        workers: synchronous Gunicorn workers, each with a model of its own.
        null: answer without computing anything.

    Raises:
        BenchUseError: nginx or Gunicorn is not installed.
        BenchError: it does not become ready.
    """
    nginx, gunicorn = find_nginx(), Path(sys.executable).with_name("gunicorn")
    if not gunicorn.exists():
        raise BenchUseError(f"{gunicorn} does not exist; run make setup for the peers of the benches")
    source = model / read_record(model).source_path
    with scratch_folder() as folder, ExitStack() as stack:
        port, socket, log = free_port(), folder / "app.sock", folder / "log"
        for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
            (folder / name).mkdir()
        template = string.Template((HERE / "old_stack" / "nginx.conf").read_text())
        settings, account = folder / "nginx.conf", pwd.getpwuid(os.geteuid()).pw_name
        settings.write_text(template.substitute(folder=folder, socket=socket, port=port, account=account))
        environment = {
            **os.environ,  # noqa: TID251 - of a process that is a part of the bench
            "OLD_STACK_MODEL": str(source.parent if source.is_file() else source),
            "OLD_STACK_GGUF": source.name if source.is_file() else "",
            "OLD_STACK_NULL": "1" if null else "0",
            "OLD_STACK_SOCKET": str(socket),
            "OLD_STACK_WORKERS": str(workers),
            # torch's default, all cores for each worker, makes its threads wait for one another: seconds instead of ms
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // workers)),
        }
        application = [str(gunicorn), "--config", str(HERE / "old_stack" / "gunicorn.conf.py"), "app:app"]
        front = [nginx, "-p", str(folder), "-c", str(settings), "-e", str(folder / "nginx-error.log")]
        served = _started(stack, application, log, environment, HERE / "old_stack")
        proxy = _started(stack, front, log, environment, folder)
        wait_until_ready(served, f"http://127.0.0.1:{port}/health", log, timeout_s=LOAD_S)
        yield Stack("old", port, (served.pid, proxy.pid))


@contextmanager
def appliance(config: ApplianceConfig, workers: int, *, null: bool) -> Iterator[Stack]:
    """Start the appliance behind an nginx of its own, with programs that compute nothing where ``null``.

    nginx has no certificate here, since the other stack's has none.

    Raises:
        BenchUseError: nginx is not installed.
        BenchError: it does not become ready.
    """
    nginx = find_nginx()
    with scratch_folder() as folder, _in_memory() as bodies, ExitStack() as stack:
        proxy = ProxyConfig(
            directory=str(folder / "sockets"),
            body_directory=str(bodies / "bodies"),
            log_directory=str(folder),
            port=free_port(),
        )
        overrides: Mapping[str, Mapping[str, object]] = {
            "server": {"workers": workers},
            "shared_memory": {"segment_count": 256},
            "proxy": msgspec.to_builtins(proxy),
        }
        served = stack.enter_context(serving(config, overrides, module=_NULL_APPLIANCE if null else SERVE))
        server = msgspec.structs.replace(config.server, workers=workers)
        settings, log = folder / "nginx.conf", folder / "log"
        settings.write_text(nginx_config(msgspec.structs.replace(config, server=server, proxy=proxy)))
        options = ["-e", str(folder / "error.log"), "-g", f"daemon off; pid {folder}/pid;", "-c", str(settings)]
        front = _started(stack, [nginx, *options], log, dict(os.environ), folder)  # noqa: TID251 - a part of the bench
        wait_until_ready(front, f"http://127.0.0.1:{proxy.port}/health/ready", log)
        yield Stack("zccp", proxy.port, (served.pid, front.pid))


@contextmanager
def _in_memory() -> Iterator[Path]:
    """A folder in the memory of the host that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="zccp-bench-", dir=SHARED_MEMORY) as folder:
        yield Path(folder)


def _started(
    stack: ExitStack, command: list[str], log: Path, environment: Mapping[str, str], folder: Path
) -> "subprocess.Popen[bytes]":
    sink = stack.enter_context(log.open("ab"))
    process = subprocess.Popen(command, stdout=sink, stderr=sink, env=dict(environment), cwd=folder)
    stack.callback(end, process)
    return process
