"""`s3kv config show | check | template`, and `s3kv fingerprint`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import command, group
from .session import FINDING, Session

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from s3kv.settings import StoreSettings
    from s3kv.store.keys import Location

app = group("The settings in force, their sources, and a file to start from.")

CONNECTOR = {
    "connector_module": "s3kv.connector",
    "connector_scheduler_class": "S3KVScheduler",
    "connector_worker_class": "S3KVWorker",
}


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="config")
    command(root, "fingerprint", example="s3kv fingerprint /models/llama-3.1-8b")(fingerprint)


@command(app, "show", example="s3kv config show --store s3://my-kv/prod")
def show(
    session: Session,
    connector: Annotated[
        bool, typer.Option("--connector", help="Only the kv_connector_config for trtllm-serve.")
    ] = False,
) -> None:
    """The settings in force, where each came from, and the kv_connector_config to give to TensorRT-LLM."""
    from .text import table

    if connector:
        session.print_json({"kv_connector_config": CONNECTOR}) if session.json else _print_yaml(CONNECTOR)
        return
    rows = list(_effective(session))
    data = {
        "settings": {name: {"value": value, "source": source} for name, value, source in rows},
        "kv_connector_config": CONNECTOR,
    }
    shown = [(name, "" if value is None else value, source) for name, value, source in rows]
    session.emit(data, table(None, ("setting", "value", "source"), shown))
    if not session.json:
        sys.stdout.write("\nFor the LLM arguments of TensorRT-LLM (the settings ride in S3KV_CONFIG):\n")
        _print_yaml(CONNECTOR)


def _print_yaml(connector: dict[str, str]) -> None:
    import yaml

    sys.stdout.write(yaml.safe_dump({"kv_connector_config": connector}, sort_keys=False))


def _effective(session: Session) -> Any:
    """(name, value, source) of every setting, in the order of the file."""
    from s3kv.settings import CONFIG_VARIABLE, read_config_file

    settings = session.settings
    path = session.config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    in_file = read_config_file(path) if path else {}
    dumped = settings.model_dump(mode="json")
    for section, values in dumped.items():
        for name, value in values.items():
            yield f"{section}.{name}", value, _source(session, section, name, in_file, path)


def _source(session: Session, section: str, name: str, in_file: dict[str, Any], path: Path | None) -> str:
    variable = f"S3KV_{section}__{name}".upper()
    environment = {key.upper(): value for key, value in os.environ.items()}
    if name in session.overrides.get(section, {}):
        return "command line"
    if environment.get(variable):
        return variable
    if name in (in_file.get(section) or {}):
        return str(path)
    return "default"


@command(app, "check", example="s3kv config check --config s3kv.yaml")
def check(session: Session) -> None:
    """Reads the settings as an agent would and says what is wrong or surprising. Asks no store: `s3kv doctor` does."""
    from .text import table

    findings = list(_findings(session))
    session.emit(
        {"findings": [{"setting": setting, "finding": text} for setting, text in findings]},
        table(None, ("setting", "finding"), findings) if findings else "The settings are well.",
    )
    if findings:
        raise typer.Exit(FINDING)


def _findings(session: Session) -> Any:
    from s3kv.settings import CONFIG_VARIABLE, unknown_variables
    from s3kv.store.keys import parse_url

    store = session.settings.store
    location = parse_url(store.url)
    for name in unknown_variables(os.environ):
        yield name, "names no setting: it is ignored (a typo?)"
    if store.ca_bundle is not None and not store.ca_bundle.is_file():
        yield "store.ca_bundle", f"{store.ca_bundle} is no file"
    if not store.tls_verify:
        yield "store.tls_verify", "any certificate is accepted: name the CA in store.ca_bundle instead"
    if location.scheme == "memory":
        yield "store.url", "memory:// is forgotten when the process ends"
    if location.scheme == "s3" and store.region is None and store.endpoint is None:
        yield "store.region", "unset: the AWS chain decides; set it so that every node agrees"
    if location.scheme == "s3" and (wrong := _wrong_for_s3(store, location)):
        yield wrong
    path = session.config or os.environ.get(CONFIG_VARIABLE)
    if path and store.secret_access_key is not None and Path(path).stat().st_mode & 0o077:
        yield "store.secret_access_key", f"{path} can be read by others: chmod 600 it"


def _wrong_for_s3(store: StoreSettings, location: Location) -> tuple[str, str] | None:
    """What AWS's variables and profiles say is settings, too."""
    from s3kv.errors import ConfigError
    from s3kv.store.s3_config import s3_config

    try:
        s3_config(store, location)
    except ConfigError as error:
        return "store", str(error)
    return None


@command(app, "template", example="s3kv config template > s3kv.yaml")
def template(session: Session) -> None:
    """A settings file with every setting, its meaning and its default, all commented out."""
    text = settings_template()
    if session.json:
        session.print_json({"template": text})
    else:
        sys.stdout.write(text)


def settings_template() -> str:
    """YAML whose every setting is commented out: as it stands it changes nothing."""
    from s3kv.settings import Settings

    lines = [
        "# Settings of s3kv. Name this file in S3KV_CONFIG; S3KV_<SECTION>__<NAME> variables win over it.",
        "# To set something, remove the # before it and before the name of its section.",
        "",
    ]
    for section, field in Settings.model_fields.items():
        model: Any = field.annotation
        lines.append(f"#{section}:")
        for name, each in model.model_fields.items():
            lines += [*(f"  # {line}" for line in _meaning(each)), f"#  {name}: {_default(each)}"]
        lines.append("")
    return "\n".join(lines)


def _meaning(field: FieldInfo) -> list[str]:
    return [field.description] if field.description else []


def _default(field: FieldInfo) -> str:
    import json

    if field.default_factory is not None and not isinstance(field.default_factory, type):
        return "(chosen for this machine)"
    value = field.get_default(call_default_factory=True)
    return json.dumps(value, default=str)


def fingerprint(
    session: Session,
    model_dir: Annotated[Path, typer.Argument(help="Folder of the checkpoint.", exists=True, file_okay=False)],
) -> None:
    """The identity of a checkpoint's weights, as the connector computes it; set identity.fingerprint to override it."""
    from s3kv.identity import fingerprint_model

    value = fingerprint_model(model_dir)
    session.emit({"model_dir": str(model_dir), "fingerprint": value}, value)
