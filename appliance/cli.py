"""The command line: ``zccp`` and its verbs.

Owns names, options, help texts and how results are shown: results on standard output (one JSON object with ``--json``),
progress and everything else on standard error, exit codes 0 (done), 1 (failed) and 2 (wrong use or configuration). What
a verb does is elsewhere and imported when the verb runs, so that ``zccp --help`` is instant.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from appliance.cli_models import models
from appliance.progress import ProgressView
from appliance.verbs import Misuse, Verbs, configured, load_config, show, table, verb

if TYPE_CHECKING:
    from appliance.config import ApplianceConfig
    from planner.build import BuildReport


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Zero-Copy Context Pipeline: serves open-weight language models with programs compiled ahead of time."""


@main.command()
@configured
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="TCP port; 0 takes a free one.")
@click.option("--workers", type=int, help="API worker processes.")
@click.option("--model", help="Model to serve.")
@click.option("--programs", help="Folder of programs that another host built; default: those built here.")
@verb
def serve(config_file: Path | None, as_json: bool, model: str | None, programs: str | None, **server: Any) -> None:
    """Serve the configured model until Ctrl-C or SIGTERM; SIGHUP reads the configuration again."""
    from appliance.lifecycle import serve as run  # noqa: PLC0415
    from appliance.model.library import ModelLibrary  # noqa: PLC0415
    from appliance.release import adopt  # noqa: PLC0415
    from appliance.telemetry import configure_logging  # noqa: PLC0415

    given = {"server": server, "model": {"reference": model}, "programs": {"directory": programs}}

    def read() -> "ApplianceConfig":
        return adopt(load_config(config_file, **given))

    config = read()
    configure_logging(config.log.level, "main")
    with ProgressView() as progress:
        folder = ModelLibrary(config.home).ensure(config.model.reference, progress.update)

    def announce(line: str) -> None:
        click.echo(line, err=True)
        if as_json:
            click.echo(json.dumps({"ready": True, "url": line.rpartition(" ")[2]}))

    sys.exit(run(config, folder, announce=announce, reread=read))


@main.command()
@configured
@click.option("--model", help="Model to fetch, convert and build for.")
@click.option("--architecture", help="Build without weights, with --out: a name of the catalogue, or a config.json.")
@click.option("--target", help="What to compile for; default: this host's CPU.")
@click.option("--devices", type=int, help="Devices that share the model.")
@click.option("--context-devices", type=int, help="Of these, how many a long context is spread over.")
@click.option("--kv-format", help="Format of keys and values; default with --out: every one, else the target's own.")
@click.option("--slots", type=int, help="Sequences that decode at the same time.")
@click.option("--max-context", type=int, help="Prompt and completion ids together; default: the model's own.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for a release, to be served elsewhere.")
@click.option("--signing-key", type=click.Path(path_type=Path), help="PEM file that signs a release; made if missing.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Compilations at once.")
@click.option("--force", is_flag=True, help="Compile even if the store is current.")
@verb
def build(config_file: Path | None, model: str | None, architecture: str | None, as_json: bool, **options: Any) -> None:
    """Fetch and convert the model and compile every program it needs; with --out, programs for other hosts."""
    out, signing_key, threads, force = (options.pop(name) for name in ("out", "signing_key", "threads", "force"))
    if (architecture or signing_key) and not out:
        raise Misuse("--architecture and --signing-key need --out, the folder of the release", as_json=as_json)
    engine = {"context" if name == "max_context" else name: value for name, value in options.items()}
    config = load_config(config_file, engine=engine, model={"reference": model})
    if config.engine.target and not config.engine.target.startswith("cpu"):
        from appliance.config import quieten_compiler  # noqa: PLC0415
        from pallas_kernels.platform import find_gpu_compiler  # noqa: PLC0415

        quieten_compiler()
        find_gpu_compiler()  # before jax is imported
    from appliance import building  # noqa: PLC0415

    if not out:
        with ProgressView() as progress:
            made = building.build_programs(config, _calibration, progress.update, force=force, threads=threads)
        show(_built(made), as_json)
        return
    key = signing_key or building.signing_key_file(config.home)
    with ProgressView() as progress:
        release = building.build_release(config, architecture, out, key, progress.update, force=force, threads=threads)
    for left_out, reason in release.left_out.items():
        click.echo(f"zccp: {left_out} is left out: {reason}", err=True)
    rows = [{"kv_format": report.directory.name, **_built(report)} for report in release.stores]
    if as_json:
        click.echo(json.dumps({"release": str(out), "public_key": str(release.public_key), "stores": rows}))
    else:
        table("stores", rows, as_json)


@main.command()
@configured
@click.option("--model", help="Model to plan for; default: the configured one, which must be in the store.")
@click.option("--architecture", help="Plan without weights: a name of the catalogue, or the path of a config.json.")
@click.option("--target", help="What to plan for; default: this host's CPU.")
@click.option("--devices", type=int, help="Devices that share the model.")
@click.option("--context-devices", type=int, help="Of these, how many a long context is spread over.")
@click.option("--kv-format", help="Format of keys and values; default: the target's own, with a table of all.")
@click.option("--slots", type=int, help="Sequences that decode at the same time.")
@click.option("--max-context", type=int, help="Prompt and completion ids together; default: the model's own.")
@click.option("--explain", is_flag=True, help="Show how a context would be held instead: --context, --free-gb.")
@click.option("--context", type=click.IntRange(min=0), help="With --explain: ids of the context.")
@click.option("--output", type=click.IntRange(min=0), default=0, help="With --explain: ids that may follow.")
@click.option("--free-gb", type=click.FloatRange(min=0), help="With --explain: free GB of each device; default: all.")
@verb
def plan(config_file: Path | None, as_json: bool, model: str | None, architecture: str | None, **options: Any) -> None:
    """Show what fits: shapes, programs, memory, sequences and padding of a model on a target."""
    question = {name: options.pop(name) for name in ("context", "output", "free_gb")}
    if options.pop("explain") != (question["context"] is not None):
        raise Misuse("--explain and --context belong together: zccp plan --explain --context 90000", as_json=as_json)
    if question["free_gb"] is not None and not math.isfinite(question["free_gb"]):
        raise Misuse(f"--free-gb is {question['free_gb']}; it must be a number of GB", as_json=as_json)
    engine = {"context" if name == "max_context" else name: value for name, value in options.items()}
    config = load_config(config_file, engine=engine, model={"reference": model})
    from appliance import plan_report  # noqa: PLC0415

    document = plan_report.answer(config, architecture, **question)
    for line in [json.dumps(document)] if as_json else plan_report.lines_of(document):
        click.echo(line)


@main.command()
@configured
@click.argument("reference", required=False)
@click.option("--form", type=click.Choice(["float32", "bf16", "int8"]), help="Weight form; default: the plan's.")
@click.option("--force", is_flag=True, help="Convert again.")
@verb
def convert(config_file: Path | None, reference: str | None, form: str | None, force: bool, as_json: bool) -> None:
    """Convert a model's weights into the form that is served."""
    config = load_config(config_file, engine={"weight_form": form}, model={"reference": reference})
    from appliance.building import convert_model  # noqa: PLC0415
    from appliance.planning import weight_form  # noqa: PLC0415
    from appliance.release import adopt  # noqa: PLC0415

    wanted = weight_form(config if form else adopt(config))
    with ProgressView() as progress:
        made = convert_model(config.home, config.model.reference, wanted, _calibration, progress.update, force=force)
    show({"model": made.folder.name, "weights": str(made.weights), "form": str(made.form), "made": made.fresh}, as_json)


@main.command()
@configured
@verb
def doctor(config_file: Path | None, as_json: bool) -> None:
    """Check this installation; exit 1 if something is wrong."""
    from dataclasses import asdict  # noqa: PLC0415

    from appliance.doctor import examine  # noqa: PLC0415
    from appliance.findings import lines  # noqa: PLC0415

    findings = examine(load_config(config_file))
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        for line in lines(findings):
            click.echo(line)
    sys.exit(1 if any(finding.state == "failed" for finding in findings) else 0)


main.add_command(models)


@main.group()
def keys() -> None:
    """API keys and what they have used."""


@keys.command("add")
@configured
@click.argument("tenant")
@click.option("--expires-days", type=click.FloatRange(min=0), default=0.0, help="Days the key is valid; 0 = for ever.")
@click.option("--requests-per-minute", type=click.IntRange(min=0), default=0, help="0 = no limit.")
@click.option("--tokens-per-minute", type=click.IntRange(min=0), default=0, help="0 = no limit.")
@click.option("--admin", is_flag=True, help="The key may read /metrics.")
@verb
def keys_add(config_file: Path | None, tenant: str, expires_days: float, as_json: bool, **limits: Any) -> None:
    """Make a key for TENANT and show it, this once."""
    from appliance.keys import add  # noqa: PLC0415

    key, record = add(load_config(config_file).keys_file, tenant, expires_in_s=expires_days * 86_400, **limits)
    if as_json:
        click.echo(json.dumps({"key": key, "id": record.id, "tenant": record.tenant}))
    else:
        click.echo(key)
        click.echo(f"key {record.id} for {record.tenant}; it is not stored and cannot be shown again", err=True)


@keys.command("list")
@configured
@verb
def keys_list(config_file: Path | None, as_json: bool) -> None:
    """The keys there are, without their secrets."""
    from appliance.keys import read  # noqa: PLC0415

    rows = [
        {
            "id": record.id,
            "tenant": record.tenant,
            "created": _date(record.created),
            "expires": _date(record.expires) if record.expires else "",
            "requests_per_minute": record.requests_per_minute,
            "tokens_per_minute": record.tokens_per_minute,
            "admin": record.admin,
        }
        for record in read(load_config(config_file).keys_file).keys
    ]
    table("keys", rows, as_json)


@keys.command("revoke")
@configured
@click.argument("key_id")
@verb
def keys_revoke(config_file: Path | None, key_id: str, as_json: bool) -> None:
    """Make a key invalid at once."""
    from appliance.keys import revoke  # noqa: PLC0415

    record = revoke(load_config(config_file).keys_file, key_id)
    show({"revoked": record.id, "tenant": record.tenant}, as_json)


@keys.command("usage")
@configured
@verb
def keys_usage(config_file: Path | None, as_json: bool) -> None:
    """Requests and tokens of each key."""
    from appliance.host.ledger import Ledger  # noqa: PLC0415
    from appliance.keys import read  # noqa: PLC0415

    config = load_config(config_file)
    tenants = {record.id: record.tenant for record in read(config.keys_file).keys}
    ledger = Ledger(config.home / "usage.bin")
    rows = [
        {"id": u.key_id, "tenant": tenants.get(u.key_id, "(revoked)"), "requests": u.requests, "tokens": u.tokens}
        for u in ledger.usage()
    ]
    ledger.close()
    table("usage", rows, as_json)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@verb
def bench(name: str, options: Sequence[str], as_json: bool) -> None:
    """Run the bench NAME (kernels, start, parity, peers, soak, chaos).

    OPTIONS are the bench's own, see zccp bench NAME --help.
    """
    try:
        from appliance.bench import runner  # noqa: PLC0415
    except ImportError as error:
        raise Misuse(f"benches are not part of this installation: {error}", as_json=as_json) from error
    sys.exit(runner.main(name, [*options, *(["--json"] if as_json else [])]))


@main.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Where the appliance listens.")
@click.option("--model", default="", help="Model to talk to; default: the served one.")
@click.option("--key-file", type=click.File("rb"), help="File with the API key; default: $ZCCP_API_KEY.")
@click.option("--system", default="", help="System message.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 = always the likeliest token.")
@verb
def chat(as_json: bool, key_file: Any, **options: Any) -> None:
    """Talk with a running appliance; in a pipe, standard input is one message."""
    from appliance.chat import ChatSettings, Conversation, say, talk  # noqa: PLC0415
    from appliance.config import client_key  # noqa: PLC0415

    key = key_file.read().decode("latin-1").strip() if key_file is not None else client_key()
    if key and not (key.isascii() and key.isprintable()):
        raise Misuse("the API key must be one line of ASCII characters; check --key-file", as_json=as_json)
    conversation = Conversation(ChatSettings(key=key, **options))
    if sys.stdin.isatty() and not as_json:
        talk(conversation, _typed_lines(), sys.stdout, sys.stderr)
        return
    try:
        text = sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        problem = f"standard input is no UTF-8 from byte {error.start} on; convert it first"
        raise Misuse(problem, as_json=as_json) from error
    if not text:
        raise Misuse("standard input is empty; give a message, or run in a terminal", as_json=as_json)
    answer = say(conversation, text, sys.stderr if as_json else sys.stdout, sys.stderr)
    if as_json:
        click.echo(json.dumps({"text": answer.text, "finish_reason": answer.finish_reason, "usage": answer.usage}))


@main.command()
@configured
@click.option("--reference", is_flag=True, help="Show every key with its type, default and meaning instead.")
@click.option("--nginx", is_flag=True, help="Print the configuration of the nginx in front instead.")
@click.option("--nginx-fleet", is_flag=True, help="Print that of the nginx in front of the nodes of a fleet instead.")
@click.option("--host", help="With --nginx: address that nginx listens on.")
@click.option("--port", type=int, help="With --nginx: its TCP port.")
@click.option("--certificate", help="With --nginx: PEM file of the certificate chain.")
@click.option("--certificate-key", help="With --nginx: PEM file of its private key.")
@verb
def config(
    config_file: Path | None, reference: bool, nginx: bool, nginx_fleet: bool, as_json: bool, **proxy: Any
) -> None:
    """Check the configuration and show the values in force."""
    if any(value is not None for value in proxy.values()) and not (nginx or nginx_fleet):
        raise Misuse("--host, --port, --certificate and --certificate-key need --nginx", as_json=as_json)
    if nginx or nginx_fleet:
        from appliance.nginx import fleet_config, nginx_config  # noqa: PLC0415

        text = (fleet_config if nginx_fleet else nginx_config)(load_config(config_file, proxy=proxy))
        click.echo(json.dumps({"nginx": text}) if as_json else text, nl=as_json)
        return
    if reference:
        from appliance.config_reference import reference_json, reference_markdown  # noqa: PLC0415

        click.echo(json.dumps(reference_json()) if as_json else reference_markdown(), nl=as_json)
        return
    from appliance.config_rules import plain  # noqa: PLC0415

    values = plain(load_config(config_file))
    if as_json:
        click.echo(json.dumps(values))
    else:
        import yaml  # noqa: PLC0415

        click.echo(yaml.safe_dump(values, sort_keys=False), nl=False)


@main.command()
@verb
def version(as_json: bool) -> None:
    """Versions of the appliance and of what it computes with."""
    from importlib import metadata  # noqa: PLC0415
    from platform import python_version  # noqa: PLC0415

    found = {"python": python_version()}
    for name in ("zccp", "jax", "jaxlib", "litestar"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    show({"zccp": found.pop("zccp"), **found}, as_json)


def _calibration(folder: Path) -> Any:
    """Calibration ids for a model, from the text that travels with the package."""
    from appliance.model.calibration import calibration_ids  # noqa: PLC0415

    return calibration_ids(folder)


def _built(report: "BuildReport") -> dict[str, Any]:
    """A store that was built, for people and scripts."""
    return {
        "store": str(report.directory),
        "programs": report.programs,
        "compiled": report.compiled,
        "bytes": report.total_bytes,
        "max_arguments": report.max_arguments,
        "memory_bytes": report.memory.total_bytes,
        "temp_bytes": report.temp_bytes,
        "alias_fraction": report.alias_fraction,
    }


def _date(seconds: float) -> str:
    from datetime import UTC, datetime  # noqa: PLC0415

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _typed_lines() -> Iterator[str]:
    """Lines a person types, with editing and history where the terminal has them."""
    import_module("readline")  # which turns editing on

    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            yield ""


if __name__ == "__main__":
    main()
