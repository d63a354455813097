"""Every setting, frozen, with its unit in its name.

Sources, later ones win: defaults, the YAML file that `S3KV_CONFIG` names, `S3KV_<SECTION>__<NAME>` variables,
arguments, of a command as of the classes below. Unknown keys are refused (SlateDB's practice: a typo must not be a
silent default).

Settings in bytes are read from numbers and from sizes such as 64GiB (2**30) or 512 MB (10**6); their values are ints.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from s3kv.errors import ConfigError
from s3kv.setting_types import (
    AbsolutePath,
    Bytes,
    Count,
    Endpoint,
    Fraction,
    Line,
    MapBytes,
    NotNegative,
    Positive,
    Secret,
    Timeout,
)
from s3kv.setting_types import read_size as read_size

CONFIG_VARIABLE = "S3KV_CONFIG"
PREFIX = "S3KV_"
NESTED = "__"
MIB = 1 << 20
GIB = 1 << 30

logger = logging.getLogger(__name__)

_NAMES = re.compile(r"""(['"])(?!<).{2,}\1""")
"""In a message of PyYAML: what the file says there, such as the name of an alias."""


def _own_folder() -> Path:
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # nothing is writable here: only who uses the folder is told
        temporary = "/tmp"
    return Path(temporary) / f"s3kv-{os.getuid()}"


class Section(BaseModel):
    # A log that shows an error's cause must not show what was given for a secret.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class StoreSettings(Section):
    url: Line = Field(
        default_factory=lambda: f"file://{_own_folder() / 'store'}",
        description="Where objects live: s3://bucket/prefix, file:///folder, or memory:// (tests).",
    )
    client: Literal["obstore", "aioboto3"] = Field(
        "obstore", description="Who carries the bytes. aioboto3 covers what only botocore does, at more CPU a byte."
    )
    region: Line | None = Field(None, description="AWS region of the bucket; the AWS chain decides when unset.")
    endpoint: Endpoint | None = Field(
        None, description="URL of an S3-compatible server; AWS's variables and profile decide when unset."
    )
    path_style: bool | None = Field(None, description="Bucket in the path; default: yes when an endpoint is set.")
    ca_bundle: AbsolutePath | None = Field(
        None, description="PEM file of CAs to trust: besides the system's (obstore), or instead (aioboto3)."
    )
    tls_verify: bool = Field(True, description="False accepts any certificate, and says so in the log at every start.")
    access_key_id: Line | None = Field(None, description="Static key; the AWS credential chain when unset.")
    secret_access_key: Secret | None = Field(None, description="Secret of access_key_id.")
    session_token: Secret | None = None
    profile: Line | None = Field(None, description="Profile of the AWS configuration files.")
    conditional_put: Literal["auto", "native", "none"] = Field(
        "auto", description="Whether If-None-Match is honoured. auto: detected once; none: head before put."
    )
    delete_mode: Literal["batch", "single"] = Field(
        "batch", description="single: one request a key, for stores that refuse bulk deletes."
    )
    checksums: Literal["when_required", "when_supported"] = Field(
        "when_required", description="aioboto3 only: when stores refuse x-amz-checksum-*, leave when_required."
    )
    payload_signing: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether a put's bytes are hashed into its signature: auto does so without TLS only. "
        "Our own checksum guards the bytes either way; signing costs 4 times the transfer's CPU.",
    )
    max_connections: Count = Field(64, description="Calls that may be under way at once; more wait their turn.")
    connect_timeout_s: Timeout = 5.0
    request_timeout_s: Timeout = Field(30.0, description="Deadline of one call, retries included.")
    retries: int = Field(4, ge=0, description="Tries after the first, with jitter, within request_timeout_s.")
    backoff_initial_s: Positive = 0.1
    backoff_max_s: Positive = 5.0
    breaker_failures: Count = Field(8, description="Failures in a row that open the circuit breaker.")
    breaker_reset_s: Positive = Field(5.0, description="How long it stays open before one call probes.")


class TierSettings(Section):
    capacity_bytes: Bytes = Field(4 * GIB, description="Host memory for all namespaces of the node, such as 64GiB.")
    namespaces: Count = Field(1, description="Namespaces to share pinned memory between; one may take 1/n of it.")
    hugepages: bool = False
    pin: Literal["auto", "require", "never"] = Field(
        "auto", description="Register arenas with CUDA; auto falls back to pageable copies with a warning."
    )
    dirty_max_fraction: Fraction = Field(0.5, description="Share of slots that may wait for upload; more is dropped.")


class SaveSettings(Section):
    enabled: bool = True
    ring_max_bytes: Bytes = Field(2 * GIB, description="Cap of the snapshot ring in GPU memory (two passes' blocks).")
    min_priority: int = Field(0, ge=0, le=100, description="Blocks of lower retention priority are not saved.")
    generated: bool = Field(True, description="Save blocks that hold generated tokens too.")


class LoadSettings(Section):
    policy: Literal["wait", "resident", "park"] = Field(
        "wait", description="wait: fetch within the budget; resident: never wait; park: hold the request meanwhile."
    )
    wait_ms_per_1k_tokens: NotNegative = Field(10.0, description="Budget earned by each 1,000 tokens still in storage.")
    wait_cap_ms: NotNegative = Field(300.0, description="Cap of the budget of one match; 0 never waits.")
    min_tokens: int = Field(0, ge=0, description="Offers smaller than this are not made.")
    max_pinned_fraction: Fraction = Field(0.8, description="Share of slots that offers may pin at once.")


class UploadSettings(Section):
    enabled: bool = True
    chunk_target_bytes: Bytes = Field(32 * MIB, description="A run is sealed once its chunk is this large.")
    seal_age_s: Positive = Field(5.0, description="A run is sealed at this age.")
    seal_grace_s: NotNegative = Field(0.2, description="After a request ends its run waits this long for late commits.")
    inflight_bytes: Bytes = 256 * MIB
    concurrency: Count = 8
    give_up_s: Positive = Field(120.0, description="A chunk not stored by then is dropped and counted.")
    codec: Literal["raw", "zstd", "auto"] = "auto"
    zstd_level: int = Field(1, ge=1, le=19)
    threads: Count = Field(default_factory=lambda: max(1, min(8, (os.cpu_count() or 2) // 2)))


class FetchSettings(Section):
    concurrency: Count = 16
    inflight_bytes: Bytes = 512 * MIB
    deadline_s: Positive = 20.0


class CatalogSettings(Section):
    index_dir: AbsolutePath | None = Field(None, description="Folder of the local index; default: beside the socket.")
    poll_interval_s: Positive = Field(
        5.0,
        description="Pause between listings of the log: $2.60 a month at 5 s, a twelfth while no engine is attached.",
    )
    publish_interval_s: Positive = Field(0.5, description="Records of chunks made within this are one log segment.")
    poll_overlap_s: NotNegative = Field(60.0, description="How far back each poll lists, against clock skew.")
    max_clock_skew_s: Positive = 300.0
    compact_after_segments: Count = 256
    map_bytes: MapBytes = Field(64 * GIB, description="Address space of the index (sparse; not memory, not disk).")


class AgentSettings(Section):
    socket: AbsolutePath = Field(
        default_factory=lambda: _own_folder() / "agent.sock",
        description="Unix socket of the node's agent.",
    )
    autostart: bool = Field(True, description="The engine's leader starts an agent when none listens.")
    start_timeout_s: Timeout = 20.0
    call_timeout_s: Timeout = Field(0.25, description="What an engine's call waits for the agent beyond its budget.")
    reconnect_s: Positive = Field(1.0, description="Pause between tries to reach a lost agent.")
    idle_exit_s: NotNegative = Field(0.0, description="Exit after this long without a client; 0 never does.")
    drain_s: Positive = Field(20.0, description="How long SIGTERM flushes before it says what was not.")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="Prometheus on 127.0.0.1; unset: none.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    max_clients: Count = 256
    trusted_uid: int | None = Field(
        None, ge=0, description="User id of the agent where an engine run by root is to trust it in any folder."
    )


def _with_text_keys(value: Any) -> Any:
    """YAML reads the ids of adapters as numbers."""
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else value


class IdentitySettings(Section):
    model: str | None = Field(None, description="Name of the model in namespace.json; default: from the engine.")
    fingerprint: str | None = Field(None, description="Identity of the weights; overrides the checkpoint's own.")
    adapters: Annotated[dict[str, str], BeforeValidator(_with_text_keys)] = Field(
        default_factory=dict, description="LoRA id of this server -> adapter identity."
    )
    extra: dict[str, str] = Field(default_factory=dict, description="Whatever else decides what KV bytes mean.")


class CollectSettings(Section):
    max_bytes: Bytes | None = None
    max_idle_s: Positive | None = None
    grace_s: NotNegative = Field(300.0, description="Pause between publishing deletions and deleting objects.")
    lease_s: Positive = 60.0
    orphan_age_s: Positive = Field(3600.0, description="An object without a record is an orphan only after this.")


class PriceSettings(Section):
    """USD; defaults are S3 Standard in us-east-1 as published by AWS; set your own."""

    storage_gb_month: NotNegative = 0.023
    put_1000: NotNegative = 0.005
    get_1000: NotNegative = 0.0004


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        env_prefix=PREFIX,
        env_nested_delimiter=NESTED,
        env_ignore_empty=True,
    )

    store: StoreSettings = StoreSettings()
    tier: TierSettings = TierSettings()
    save: SaveSettings = SaveSettings()
    load: LoadSettings = LoadSettings()
    upload: UploadSettings = UploadSettings()
    fetch: FetchSettings = FetchSettings()
    catalog: CatalogSettings = CatalogSettings()
    agent: AgentSettings = AgentSettings()
    identity: IdentitySettings = IdentitySettings()
    collect: CollectSettings = CollectSettings()
    price: PriceSettings = PriceSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


class _FileBelowEnvironment(Settings):
    """Its arguments are what a file says: variables win over them."""

    @classmethod
    def settings_customise_sources(cls, *sources: Any, **named: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        return super().settings_customise_sources(*sources, **named)[::-1]


def read_config_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML settings file. A section without settings (all of them commented out) is left out.

    Raises ConfigError that names the file.
    """
    try:
        loaded = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read: {error.strerror} ({CONFIG_VARIABLE})") from error
    except ValueError as error:
        raise ConfigError(f"settings file {path} is not valid YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"settings file {path} must hold a mapping of sections, not a {type(loaded).__name__}")
    for section in loaded:
        if section not in Settings.model_fields:
            raise ConfigError(f"unknown setting {section} in {path}")
    return {section: values for section, values in loaded.items() if values is not None}


def read_yaml(text: str) -> Any:
    """What `text` says. Raises ValueError, whose reason is without the text, which may hold a secret."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(line + _NAMES.sub(r"\1…\1", str(error.problem))) from error
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:  # what becomes a date, a number or a !!tag raises whatever it meets
        raise ValueError("it has a date or number that is none: put text in quotes") from error


def unknown_variables(names: Iterable[str]) -> list[str]:
    """`S3KV_<SECTION>__<NAME>` variables that name no section: nothing reads them. Sorted."""
    return sorted(
        name
        for name in names
        if name.upper().startswith(PREFIX)
        and NESTED in name
        and name[len(PREFIX) :].lower().partition(NESTED)[0] not in Settings.model_fields
    )


def load_settings(path: Path | None = None, **overrides: dict[str, Any]) -> Settings:
    """Settings from file, environment and `overrides` (section name -> values; these win).

    Raises ConfigError, one sentence that names the setting.
    """
    if path is None and os.environ.get(CONFIG_VARIABLE):
        path = Path(os.environ[CONFIG_VARIABLE])
    for name in unknown_variables(os.environ):
        logger.warning("environment variable %s names no setting and is ignored", name)
    values = read_config_file(path) if path is not None else {}
    try:
        settings = _FileBelowEnvironment(**values)
    except ValidationError as error:
        raise ConfigError(_one_sentence(error, path)) from error
    except (SettingsError, RecursionError) as error:
        raise ConfigError(f"{_not_json()} must hold a JSON object, or be unset") from error
    sections = dict(settings) | {name: _overridden(settings, name, changes) for name, changes in overrides.items()}
    return Settings.model_construct(settings.model_fields_set | overrides.keys(), **sections)


def _overridden(settings: Settings, section: str, changes: dict[str, Any]) -> Section:
    """The section with `changes`. Only what somebody set goes in, so that it still tells set values from defaults."""
    if section not in Settings.model_fields:
        raise ConfigError(f"unknown setting {section}")
    before: Section = getattr(settings, section)
    try:
        return before.model_validate({**before.model_dump(exclude_unset=True), **changes})
    except ValidationError as error:
        raise ConfigError(_one_sentence(error, None, section)) from error


def _not_json() -> str:
    """The variables that stand for a whole section or mapping and cannot be read."""
    wanted = set()
    for section, field in Settings.model_fields.items():
        model: Any = field.annotation
        mappings = [name for name, each in model.model_fields.items() if get_origin(each.annotation) is dict]
        wanted |= {PREFIX + section.upper(), *(f"{PREFIX}{section}{NESTED}{name}".upper() for name in mappings)}
    found = (name for name, value in os.environ.items() if name.upper() in wanted and not _is_json(value))
    return " or ".join(sorted(found))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _one_sentence(error: ValidationError, path: Path | None, *within: str) -> str:
    first = error.errors()[0]
    parts = [str(part) for part in (*within, *first["loc"]) if part != "[key]"]
    name, variable = ".".join(parts), PREFIX + NESTED.join(parts).upper()
    if first["type"] == "extra_forbidden":
        where = f" in {path}" if path is not None else ""
        return f"unknown setting {name}{where} (or {variable})"
    if len(parts) == 1:
        return f"section {name} must hold settings by name{f' in {path}' if path is not None else ''} (or {variable})"
    return f"setting {name} (or {variable}): {first['msg'][:1].lower()}{first['msg'][1:]}"
