"""The verb ``zccp models``: the models on this machine, how they come, go on to other machines, and are removed.

Owns names, options and help texts. What is done is elsewhere and imported when it is done.
"""

from pathlib import Path

import click

from appliance.progress import ProgressView
from appliance.verbs import Misuse, configured, load_config, show, table, verb


@click.group(invoke_without_command=True)
@configured
@click.pass_context
@verb
def models(context: click.Context, config_file: Path | None, as_json: bool) -> None:
    """The models on this machine; without a command they are listed."""
    if context.invoked_subcommand is None:
        _list_models(config_file, as_json)
    elif config_file is not None or as_json:
        raise Misuse(f"options go after the command: zccp models {context.invoked_subcommand} ...", as_json=as_json)


@models.command("list")
@configured
@verb
def models_list(config_file: Path | None, as_json: bool) -> None:
    """Stored models and those that can be fetched by name."""
    _list_models(config_file, as_json)


def _list_models(config_file: Path | None, as_json: bool) -> None:
    from appliance.model.catalog import CATALOG  # noqa: PLC0415
    from appliance.model.library import ModelLibrary  # noqa: PLC0415

    stored = {record.name: record for record in ModelLibrary(load_config(config_file).home).records()}
    rows = [
        {"name": record.name, "stored": True, "reference": record.reference, "licence": record.licence}
        for record in stored.values()
    ]
    rows += [
        {"name": entry.name, "stored": False, "reference": entry.name, "licence": entry.licence}
        for entry in CATALOG.values()
        if entry.name not in stored
    ]
    table("models", rows, as_json)


@models.command("pull")
@configured
@click.argument("reference")
@verb
def models_pull(config_file: Path | None, reference: str, as_json: bool) -> None:
    """Fetch a model: a catalogue name, a GGUF file, a Hugging Face directory or hf:org/name."""
    from appliance.model.catalog import CATALOG  # noqa: PLC0415
    from appliance.model.library import ModelLibrary  # noqa: PLC0415

    entry = CATALOG.get(reference)
    if entry is not None and entry.notice:
        click.echo(entry.notice, err=True)
    with ProgressView() as progress:
        folder = ModelLibrary(load_config(config_file).home).ensure(reference, progress.update)
    show({"model": folder.name, "folder": str(folder)}, as_json)


@models.command("export")
@configured
@click.argument("name")
@click.argument("archive", type=click.Path(dir_okay=False, path_type=Path))
@verb
def models_export(config_file: Path | None, name: str, archive: Path, as_json: bool) -> None:
    """Write the stored model NAME with its converted weights into the tar file ARCHIVE."""
    from appliance.model.archive import export_model  # noqa: PLC0415
    from appliance.model.library import ModelLibrary  # noqa: PLC0415

    folder = ModelLibrary(load_config(config_file).home).folder(name)
    with ProgressView() as progress:
        digest = export_model(folder, archive, progress.update)
    show({"model": folder.name, "archive": str(archive), "sha256": digest}, as_json)


@models.command("import")
@configured
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--sha256", help="Of the archive, in hex, as zccp models export told it.")
@verb
def models_import(config_file: Path | None, archive: Path, sha256: str | None, as_json: bool) -> None:
    """Bring the model of a tar file in, in place of a stored one of its name; no network is used."""
    from appliance.model.archive import import_model  # noqa: PLC0415

    home = load_config(config_file).home
    with ProgressView() as progress:
        folder = import_model(archive, home / "models", sha256, progress.update)
    show({"model": folder.name, "folder": str(folder)}, as_json)


@models.command("rm")
@configured
@click.argument("name")
@click.option("--force", is_flag=True, help="Also the model that the configuration serves.")
@verb
def models_rm(config_file: Path | None, name: str, force: bool, as_json: bool) -> None:
    """Remove the stored model NAME with everything that was fetched and converted."""
    from appliance.model.archive import remove_model  # noqa: PLC0415
    from appliance.model.library import ModelLibrary  # noqa: PLC0415

    config = load_config(config_file)
    library = ModelLibrary(config.home)
    folder = library.folder(name)
    if not force and folder == library.folder(config.model.reference):
        raise Misuse(f"{folder.name} is the model that the configuration serves; --force removes it", as_json=as_json)
    size = remove_model(folder)
    show({"removed": folder.name, "bytes": size}, as_json)
