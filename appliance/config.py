"""ApplianceConfig: everything an operator can choose, read once from one YAML file and the environment.

Owns the sections, their defaults and the names of the environment variables; it is the only module that reads the
environment. Every rule is checked before anything starts (``appliance.config_rules``). Never imports jax.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from appliance.config_cache import CacheConfig
from appliance.config_file import parse
from appliance.config_fleet import FleetConfig
from appliance.config_proxy import ProxyConfig, with_absolute_paths
from appliance.config_rules import ConfigError, rule_problems, shape_problems
from appliance.host.segments import SEGMENT_TOKENS
from pallas_kernels.card import find_card
from planner.target import DEFAULT_TARGET, find_target

SYSTEM_CONFIG = Path("/etc/zccp/config.yaml")


def _text(description: str) -> Meta:
    return Meta(description=description)


def _number(low: float, high: float, description: str) -> Meta:
    return Meta(ge=low, le=high, description=description)


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side."""

    host: Annotated[str, _text("Address to listen on. Anything but loopback needs an API key.")] = "127.0.0.1"
    port: Annotated[int, _number(0, 65535, "TCP port; 0 takes a free one.")] = 8000
    http2: Annotated[bool, _text("Offer HTTP/2 without TLS beside HTTP/1.1, where the HTTP server can.")] = False
    max_connections: Annotated[int, _number(1, 65536, "Open connections of the node.")] = 1024
    workers: Annotated[int, _number(1, 64, "API worker processes.")] = 1
    max_body_mb: Annotated[float, _number(0.001, 1024, "Largest request body, MiB; a larger one gets 413.")] = 16.0
    keepalive_s: Annotated[float, _number(0.05, 600, "Pause in a stream after which a keep-alive is sent, s.")] = 15.0
    write_timeout_s: Annotated[float, _number(0.1, 3600, "Time a client may leave a stream unread, s.")] = 60.0
    drain_s: Annotated[float, _number(0, 3600, "Time that running requests get after SIGTERM, s.")] = 30.0
    worker_timeout_s: Annotated[
        float, _number(0, 86_400, "Silence after which a ready worker counts as hung and is replaced, s; 0 = never.")
    ] = 20.0
    cors_origins: Annotated[tuple[str, ...], _text("Origins that browsers may call from; empty = none.")] = ()
    request_timeout_s: Annotated[float, _number(0, 86400, "Longest a request may take, s; 0 = no bound.")] = 0.0


class GpuConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device; without a GPU only ``paged_attention_page_size`` has an effect."""

    device_id: Annotated[int, _number(0, 63, "Index of the GPU; of several, the first.")] = 0
    memory_limit_mb: (
        Annotated[int, _number(256, 4_194_304, "Most memory of a GPU, MiB; empty = what its target has.")] | None
    ) = None
    paged_attention_page_size: Annotated[int, _number(64, 2048, "Page size in bytes of ids, 4 a token.")] | None = None


class SharedMemoryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Context segments, through which token ids pass between processes."""

    segment_count: Annotated[int, _number(8, 65536, "Segments of the node; one a running or waiting choice.")] = 128
    segment_size_kb: Annotated[int, _number(1, 1_048_576, "KiB a segment; a multiple of 4, at least 516.")] = 1024
    cleanup_interval_ms: Annotated[
        int, _number(1000, 86_400_000, "Interval of the sweep for segments of dead instances, ms.")
    ] = 30_000


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The served model."""

    reference: Annotated[
        str, _text("Catalogue name, path of a GGUF file or Hugging Face directory, or hf:org/name.")
    ] = "smollm2-135m"
    name: Annotated[str, _text("Name in the API; empty = the name in the model store.")] = ""
    aliases: Annotated[dict[str, str], _text("Further names in the API, each with its model.")] = field(
        default_factory=dict[str, str]
    )


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of the engine; an empty value means: derived from the model and the device."""

    target: Annotated[str, _text("What programs are compiled for; empty = this host's CPU.")] = ""
    context: Annotated[int, _number(64, 131_072, "Prompt and completion ids together.")] | None = None
    slots: Annotated[int, _number(1, 512, "Sequences that decode at the same time.")] | None = None
    prefill_chunk: Annotated[int, _number(16, 16_384, "Most prompt ids of one step; a multiple of 16.")] | None = None
    prefill_rows: Annotated[int, _number(1, 64, "Most prompts that share one step.")] | None = None
    page_size: Annotated[int, _number(16, 512, "Tokens a page of keys and values; a power of two.")] | None = None
    kv_format: (
        Annotated[
            Literal["float32", "bf16", "int8", "bmq4", "bmq2", "auto"],
            _text("Format of keys and values; auto = the most bits with which the longest context fits."),
        ]
        | None
    ) = None
    weight_form: Annotated[Literal["float32", "bf16", "int8"], _text("Format of weights.")] | None = None
    implementation: (
        Annotated[
            Literal["xla", "native", "pallas"],
            _text("Code path of the programs; empty = pallas on a GPU, native where the CPU can."),
        ]
        | None
    ) = None
    devices: Annotated[int, _number(1, 64, "Devices of this host that share the model.")] = 1
    context_devices: Annotated[
        int, _number(1, 64, "Of these, how many a long context is spread over; a divisor of devices.")
    ] = 1
    kv_memory_mb: Annotated[int, _number(1, 4_194_304, "Memory for keys and values on each device, MiB.")] | None = None
    max_waiting: Annotated[int, _number(1, 65_536, "Sequences that may wait; more get 429.")] = 256
    max_waiting_tokens: Annotated[int, _number(64, 1 << 31, "Prompt ids that may wait; more get 429.")] = 524_288
    near_gpu: Annotated[bool, _text("Keep all processes on the NUMA nodes of the GPUs; no effect without one.")] = True
    step_timeout_s: Annotated[
        float, _number(0, 86_400, "Silence after which a ready engine counts as hung and is replaced, s; 0 = never.")
    ] = 60.0


class ProgramsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Programs that another host built (``zccp build --out``)."""

    directory: Annotated[str, _text("Folder of a release; empty = programs built on this host.")] = ""
    public_key: Annotated[
        str, _text("PEM file of the public key that signed it; empty = the key of this host's own builds.")
    ] = ""


class PredictionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths of completions, learned from finished requests for admission."""

    enabled: Annotated[bool, _text("Learn how long answers get, and admit requests by it.")] = True


class AuthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """API keys."""

    keys_file: Annotated[str, _text("File of hashed keys; empty = keys.json in paths.home.")] = ""
    allow_unauthenticated_non_loopback: Annotated[
        bool, _text("Serve other machines without any key. Say so only behind something that checks.")
    ] = False


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _text("Least level that is written.")] = "info"
    log_prompts: Annotated[bool, _text("Reserved: prompts are never logged; only false is accepted.")] = False


class TelemetryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is told about single requests, beside their line in the log."""

    otlp_endpoint: Annotated[
        str, _text("Traces endpoint of a collector, as `http://localhost:4318/v1/traces`; empty = no traces are sent.")
    ] = ""
    trace_sample_ratio: Annotated[
        float, _number(0, 1, "Share of traces sent of those that begin here; a caller's own choice is kept.")
    ] = 1.0
    slow_request_s: Annotated[
        float, _number(0, 86_400, "Requests that take longer are logged as warnings, marked slow, s; 0 = none.")
    ] = 60.0


class PathsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the appliance keeps things."""

    home: Annotated[str, _text("State: models, programs, keys. Empty = ZCCP_HOME, else the user's data folder.")] = ""
    run: Annotated[str, _text("Sockets and metrics. Empty = ZCCP_RUN, else the user's run-time folder.")] = ""


class ApplianceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration; after ``load`` every path is absolute and every rule holds."""

    server: ServerConfig = ServerConfig()
    proxy: ProxyConfig = ProxyConfig()
    fleet: FleetConfig = FleetConfig()
    gpu: GpuConfig = GpuConfig()
    cache: CacheConfig = CacheConfig()
    shared_memory: SharedMemoryConfig = SharedMemoryConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    programs: ProgramsConfig = ProgramsConfig()
    prediction: PredictionConfig = PredictionConfig()
    auth: AuthConfig = AuthConfig()
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    paths: PathsConfig = PathsConfig()

    @property
    def home(self) -> Path:
        """The state directory."""
        return Path(self.paths.home)

    @property
    def run(self) -> Path:
        """The directory under which each run makes its own."""
        return Path(self.paths.run)

    @property
    def keys_file(self) -> Path:
        """The file of hashed keys."""
        return Path(self.auth.keys_file)

    @property
    def num_segments(self) -> int:
        """Segments that there are: those that serve, and a worker's share more for the next one that takes over."""
        count, workers = self.shared_memory.segment_count, self.server.workers
        return count + -(-count // workers)

    @property
    def segment_bytes(self) -> int:
        """Memory of all segments."""
        return self.num_segments * self.shared_memory.segment_size_kb * 1024

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request."""
        return int(self.server.max_body_mb * 1024 * 1024)

    def context_of(self, model_context: int) -> int:
        """Prompt and completion ids together that a request may have, for a model made for ``model_context``."""
        return min(self.engine.context or model_context, SEGMENT_TOKENS)

    @property
    def page_size(self) -> int | None:
        """Tokens a page, whichever way it was given; None = derived."""
        if self.gpu.paged_attention_page_size is not None:
            return self.gpu.paged_attention_page_size // 4
        return self.engine.page_size


ENVIRONMENT: Mapping[str, str] = {
    "ZCCP_CONFIG": "Path of the configuration file, where --config is not given.",
    "ZCCP_HOME": "State directory, where paths.home is not given.",
    "ZCCP_RUN": "Run-time directory, where paths.run is not given.",
    "ZCCP_API_KEY": "Key that `zccp chat` sends, where --key-file is not given.",
}
"""The environment variables that the appliance reads for itself, with their meaning."""


def load(path: Path | None = None, overrides: Mapping[str, Mapping[str, object]] | None = None) -> ApplianceConfig:
    """Read, complete and check the configuration.

    Args:
        path: the file; None = ``ZCCP_CONFIG``, else the system's file where it exists, else defaults.
        overrides: section -> key -> value, from the command line; they win over the file.

    Raises:
        ConfigError: the file cannot be read, or any rule is broken; every broken rule is named.
    """
    given = path or _environment_path("ZCCP_CONFIG")
    if given is None and SYSTEM_CONFIG.is_file():
        given = SYSTEM_CONFIG
    data = parse(given) if given is not None else {}
    return build(data, overrides or {})


def build(data: Mapping[str, object], overrides: Mapping[str, Mapping[str, object]]) -> ApplianceConfig:
    """A checked configuration from parsed data.

    Raises:
        ConfigError: with every broken rule.
    """
    merged: dict[str, object] = dict(data)
    for section, values in overrides.items():
        present = merged.get(section)
        merged[section] = {**(present if isinstance(present, dict) else {}), **values}
    problems = shape_problems(merged, ApplianceConfig)
    if problems:
        raise ConfigError(problems)
    merged = {section: values for section, values in merged.items() if values is not None}
    try:
        config = msgspec.convert(merged, ApplianceConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError([str(error)]) from error
    config = _with_paths(config)
    problems = rule_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def notify_address() -> str | None:
    """The service manager's notification socket (``NOTIFY_SOCKET``), None without one."""
    return os.environ.get("NOTIFY_SOCKET") or None  # noqa: TID251


def watchdog_interval_s() -> float | None:
    """Seconds within which the service manager expects a sign of life (``WATCHDOG_USEC``), None without one."""
    value = os.environ.get("WATCHDOG_USEC", "")  # noqa: TID251
    return int(value) / 1e6 if value.isdigit() and int(value) > 0 else None


def client_key() -> str | None:
    """The key that a client on this machine should send (``ZCCP_API_KEY``)."""
    return os.environ.get("ZCCP_API_KEY") or None  # noqa: TID251


def quieten_compiler() -> None:
    """Keep back what a compiler for GPUs remarks on every program, unless asked for; call before jax is imported.

    It takes the donated state, which it counts twice, for more than the memory there is. What programs take is checked
    when they are compiled.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # noqa: TID251


def encode_as_workers_do() -> None:
    """Keep the tokenizer library from starting threads of its own in this process, as ``worker_environment`` does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # noqa: TID251


def share_counts(metrics: Path) -> None:
    """Have this process write its counters where all processes of the node do; call before it makes any."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)  # noqa: TID251


def worker_environment(metrics: Path) -> dict[str, str]:
    """The environment of an API worker; ``metrics`` is where all processes of the node write their counters.

    A long body passes through three large buffers. malloc would map and unmap each of them for every request, which
    takes longer than to decode the body; so it keeps up to 64 MiB of what was freed.
    """
    environment = {
        **_inherited(),
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    environment.setdefault(
        "GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
    )
    return environment


def engine_environment(config: ApplianceConfig, metrics: Path) -> dict[str, str]:
    """The environment of the engine process.

    Of a GPU, XLA takes at once what the memory plan counts on; left to itself it would never take more than three
    quarters. On a CPU every program run takes its scratch memory from malloc: huge pages make that ten times fewer page
    faults.
    """
    environment = {
        **_inherited(),
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    target = find_target(config.engine.target or DEFAULT_TARGET)
    if target.card:
        limit = config.gpu.memory_limit_mb
        usable = target.usable_bytes if limit is None else limit * 1024**2
        share = usable / find_card(target.card).memory_bytes
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_CLIENT_MEM_FRACTION": f"{share:.4f}"}
        environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the older name, refused beside the newer
    else:
        environment["JAX_PLATFORMS"] = "cpu"
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        if config.engine.devices > 1:
            flag = f"--xla_force_host_platform_device_count={config.engine.devices}"
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    cards = range(config.gpu.device_id, config.gpu.device_id + config.engine.devices)
    environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, cards)))
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return environment


def training_environment() -> dict[str, str]:
    """The environment of the process that trains the length predictor: one thread, and no accelerator to be seen."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **_inherited(),
        **threads,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _inherited() -> dict[str, str]:
    """The parent's environment without what is meant for the parent or for a client alone."""
    own = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "ZCCP_API_KEY"}
    return {name: value for name, value in os.environ.items() if name not in own}  # noqa: TID251


def _environment_path(name: str) -> Path | None:
    value = os.environ.get(name)  # noqa: TID251
    return Path(value).expanduser() if value else None


def _with_paths(config: ApplianceConfig) -> ApplianceConfig:
    home = Path(config.paths.home).expanduser() if config.paths.home else _default_home()
    run = Path(config.paths.run).expanduser() if config.paths.run else _default_run(home)
    keys = Path(config.auth.keys_file).expanduser() if config.auth.keys_file else home / "keys.json"
    return msgspec.structs.replace(
        config,
        paths=PathsConfig(home=str(home.absolute()), run=str(run.absolute())),
        proxy=with_absolute_paths(config.proxy),
        auth=msgspec.structs.replace(config.auth, keys_file=str(keys.absolute())),
        programs=ProgramsConfig(
            directory=_absolute(config.programs.directory), public_key=_absolute(config.programs.public_key)
        ),
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _default_home() -> Path:
    data = _environment_path("XDG_DATA_HOME") or Path("~/.local/share").expanduser()
    return _environment_path("ZCCP_HOME") or data / "zccp"


def _default_run(home: Path) -> Path:
    runtime = _environment_path("XDG_RUNTIME_DIR")
    return _environment_path("ZCCP_RUN") or (runtime / "zccp" if runtime is not None else home / "run")
