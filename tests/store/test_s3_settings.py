"""Wrong settings give one line that names the setting (field report 45); the environment stays out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import Cli
from support.faulty_proxy import faulty_proxy, s3_error
from support.opener import Opener
from support.servers import S3Place
from support.tls import make_ca_and_server

from s3kv.errors import (
    ConfigError,
    PermissionDenied,
    StoreMisconfigured,
    Transient,
)
from s3kv.settings import StoreSettings, load_settings
from s3kv.store import describe_failure, open_store
from s3kv.store.admin_client import admin_client
from s3kv.store.keys import parse_url
from s3kv.store.s3_config import s3_config
from s3kv.store.testing import pattern

both = pytest.mark.parametrize("client", ["obstore", "aioboto3"])


MISCONFIGURATIONS = {
    "wrong region": (
        s3_error(400, "AuthorizationHeaderMalformed", "the region 'us-east-1' is wrong; expecting 'eu-west-1'"),
        StoreMisconfigured,
        "store.region",
    ),
    "redirected region": (
        s3_error(301, "PermanentRedirect", "use another endpoint"),
        StoreMisconfigured,
        "store.region",
    ),
    "skewed clock": (s3_error(403, "RequestTimeTooSkewed"), StoreMisconfigured, "clock"),
    "no such bucket": (s3_error(404, "NoSuchBucket"), StoreMisconfigured, "store.url"),
    "unknown key": (s3_error(403, "InvalidAccessKeyId"), PermissionDenied, "store.access_key_id"),
    "wrong secret": (s3_error(403, "SignatureDoesNotMatch"), PermissionDenied, "store.secret_access_key"),
    "expired": (s3_error(400, "ExpiredToken"), PermissionDenied, "store.session_token"),
    "denied": (s3_error(403, "AccessDenied"), PermissionDenied, "permission"),
}


@both
@pytest.mark.parametrize("name", MISCONFIGURATIONS)
async def test_case_45_one_line_that_names_the_setting(opened: Opener, client: str, name: str) -> None:
    fault, kind, setting = MISCONFIGURATIONS[name]
    store = opened(client=client)
    opened.proxy.inject(fault, times=None)
    for call in (store.put("k", b"x"), store.get("k", 1)):
        opened.proxy.seen.clear()
        with pytest.raises(kind) as caught:
            await call
        assert isinstance(caught.value, ConfigError)
        assert_one_line(caught.value, opened.place, setting)
        assert opened.proxy.count() <= 3, "no endless retry"


@both
async def test_case_45_wrong_ca_bundle(opened: Opener, client: str, tmp_path: Path, seaweedfs: str) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    right, context = make_ca_and_server(tmp_path / "right")
    wrong, _ = make_ca_and_server(tmp_path / "wrong")
    with faulty_proxy(seaweedfs, context) as tls:
        for ca_bundle in (None, wrong):
            store = opened(client=client, endpoint=tls.endpoint, ca_bundle=ca_bundle)
            with pytest.raises(StoreMisconfigured) as caught:
                await store.put("k", b"x")
            assert_one_line(caught.value, opened.place, "store.ca_bundle (or S3KV_STORE__CA_BUNDLE)")
        store = opened(client=client, endpoint=tls.endpoint, ca_bundle=right)
        await store.put("k", pattern(100_000))
        assert await store.get("k", 100_000) == pattern(100_000)
        assert tls.seen[-2].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD", "over TLS the payload is not signed"


@both
@pytest.mark.parametrize("given", ["setting", "AWS_CA_BUNDLE"])
async def test_a_bundle_of_several_authorities_is_trusted_whole(
    opened: Opener, client: str, given: str, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "other").mkdir()
    right, context = make_ca_and_server(tmp_path / "right")
    other, _ = make_ca_and_server(tmp_path / "other")
    bundle = tmp_path / "bundle.pem"
    for number, parts in enumerate(((other, right), (right, other))):
        bundle.write_bytes(b"\n".join(part.read_bytes() for part in parts))
        if given == "AWS_CA_BUNDLE":
            clean_environment.setenv(given, str(bundle))
        with faulty_proxy(opened.place.endpoint, context) as tls:
            store = opened(client=client, endpoint=tls.endpoint, ca_bundle=bundle if given == "setting" else None)
            await store.put(f"k{number}", b"x")


def test_a_bundle_that_cannot_be_read_is_named_by_what_named_it(
    moto_place: S3Place, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"^AWS_CA_BUNDLE: .*none\.pem cannot be read"):
        open_store(moto_place.settings())


@both
async def test_case_45_verification_is_given_up_loudly(
    opened: Opener, client: str, tmp_path: Path, seaweedfs: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, context = make_ca_and_server(tmp_path)
    with faulty_proxy(seaweedfs, context) as tls:
        store = opened(client=client, endpoint=tls.endpoint, tls_verify=False)
        assert "NOT verified" in caplog.text
        await store.put("k", b"x")


@both
@pytest.mark.parametrize(
    ("endpoint", "setting"), [("http://127.0.0.1:1", "store.endpoint"), ("http://nowhere.invalid:80", "store.endpoint")]
)
async def test_case_45_unreachable_endpoints(opened: Opener, client: str, endpoint: str, setting: str) -> None:
    store = opened(client=client, endpoint=endpoint, retries=1)
    with pytest.raises(Transient) as caught:
        await store.put("k", b"x")
    assert_one_line(caught.value, opened.place, setting)


@both
async def test_the_environment_does_not_leak_into_given_settings(
    opened: Opener, client: str, clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.setenv("AWS_SESSION_TOKEN", "left over")
    clean_environment.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    clean_environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = opened(client=client)
    await store.put("k", b"x")
    assert "x-amz-security-token" not in opened.proxy.seen[0].headers


@both
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
async def test_the_endpoint_of_the_environment_is_used_where_the_settings_name_none(
    opened: Opener, client: str, variable: str, clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    clean_environment.setenv(variable, opened.proxy.endpoint + "/")
    store = opened(client=client, endpoint=None)
    await store.put("k", b"x")
    assert await store.get("k", 1) == b"x"
    assert all(each.path.startswith(f"/{opened.place.bucket}/") for each in opened.proxy.seen)


PROFILES = """
[profile plain]
endpoint_url = {endpoint}
[profile by-service]
services = here
endpoint_url = http://127.0.0.1:1
[services here]
s3 =
  endpoint_url = {endpoint}
[profile ignoring]
ignore_configured_endpoint_urls = true
endpoint_url = {endpoint}
"""


@pytest.fixture
def profiles(opened: Opener, tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config"
    path.write_text(PROFILES.format(endpoint=opened.proxy.endpoint))
    clean_environment.setenv("AWS_CONFIG_FILE", str(path))
    return path


@both
@pytest.mark.parametrize("profile", ["plain", "by-service"])
async def test_the_endpoint_of_the_profile_is_used_where_nothing_else_names_one(
    opened: Opener, client: str, profile: str, profiles: Path
) -> None:
    store = opened(client=client, endpoint=None, profile=profile)
    await store.put("k", b"x")
    assert [each.path for each in opened.proxy.seen] == [f"/{opened.place.bucket}/{opened.place.prefix}/k"]


def test_a_variable_comes_before_the_profile_which_may_forbid_both(
    moto_place: S3Place, profiles: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    def endpoint(profile: str) -> str | None:
        settings = moto_place.settings(endpoint=None, profile=profile)
        return s3_config(settings, parse_url(settings.url)).endpoint

    clean_environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert endpoint("by-service") == "http://127.0.0.1:2"
    assert endpoint("ignoring") is None


def test_variables_can_be_ignored_where_there_are_no_profiles(
    moto_place: S3Place, clean_environment: pytest.MonkeyPatch
) -> None:
    settings = moto_place.settings(endpoint=None)
    clean_environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert s3_config(settings, parse_url(settings.url)).endpoint == "http://127.0.0.1:2"
    clean_environment.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert s3_config(settings, parse_url(settings.url)).endpoint is None


def test_a_profile_that_cannot_be_read_is_named(
    moto_place: S3Place, profiles: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"store\.profile .* there is no profile 'absent'"):
        open_store(moto_place.settings(endpoint=None, profile="absent"))
    with pytest.raises(ConfigError, match=r"store\.profile .* there is no profile 'absent'"):
        admin_client(moto_place.settings(profile="absent"))
    clean_environment.setenv("AWS_PROFILE", "gone")
    with pytest.raises(ConfigError, match="AWS_PROFILE: there is no profile 'gone'"):
        open_store(moto_place.settings(endpoint=None))
    profiles.write_text("[broken")
    with pytest.raises(ConfigError, match=str(profiles)):
        open_store(moto_place.settings(endpoint=None))


BAD_ENDPOINTS = {
    "localhost:9000": "must begin with http",
    "ftp://user:hush@host": "must begin with http",
    "http://": "must be a URL",
    "http://:9000": "must be a URL",
    "http://[::1": "must be a URL",
    "http://[::g]": "must be a URL",
    "http://[:::1]": "must name a host",
    "http://256.1.1.1": "must name a host",
    "http://1.2.3.4.5": "must name a host",
    "http://a b": "must be a URL",
    "http://a^b": "must be a URL",
    "http://%41": "must be a URL",
    "http://a\\b": "must be a URL",
    "http://m\u00fcnchen.example": "must be a URL",
    "http://host/a b": "must be a URL",
    "http://host:99999": "must have a port",
    "http://host:0": "must have a port",
    "http://host:": "must be a URL",
    "http://host:http": "must be a URL",
    "http://host/?hush=1": "must be a URL",
    "http://host/#hush": "must be a URL",
    "http://user:hush@host": "must be a URL",
    "http://hush@host": "must be a URL",
}


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
def test_an_endpoint_that_is_none_is_refused_by_the_name_it_came_under(
    moto_place: S3Place, endpoint: str, profiles: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    why = BAD_ENDPOINTS[endpoint]
    with pytest.raises(ConfigError, match=rf"^setting store\.endpoint \(or S3KV_STORE__ENDPOINT\): {why}") as caught:
        load_settings(store={"endpoint": endpoint})
    assert "hush" not in str(caught.value)
    ran = Cli("--endpoint", endpoint)("config", "check")
    assert ran.code == 1 and "store.endpoint" in ran.err and "hush" not in ran.err and "internal" not in ran.err
    profiles.write_text(f"[profile odd]\nendpoint_url = {endpoint}\n")
    for use in (open_store, admin_client):
        with pytest.raises(ConfigError, match=f"^endpoint_url of the AWS profile {why}") as caught:
            use(moto_place.settings(endpoint=None, profile="odd"))
        assert "hush" not in str(caught.value)
    clean_environment.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match=f"^AWS_ENDPOINT_URL {why}") as caught:
        open_store(moto_place.settings(endpoint=None))
    assert "hush" not in str(caught.value)


GOOD_ENDPOINTS = [
    "http://[::1]:9000",
    "http://127.0.0.1/",
    "https://minio-1.svc:65535",
    "https://x.example/storage/v1/s3",
]


@both
@pytest.mark.parametrize("endpoint", GOOD_ENDPOINTS)
def test_other_endpoints_are_taken(moto_place: S3Place, client: str, endpoint: str) -> None:
    settings = moto_place.settings(client=client, endpoint=load_settings(store={"endpoint": endpoint}).store.endpoint)
    open_store(settings)
    admin_client(settings)
    assert s3_config(settings, parse_url(settings.url)).endpoint == endpoint.rstrip("/")


def test_what_only_botocore_refuses_is_named(moto_place: S3Place) -> None:
    with pytest.raises(ConfigError, match=r"^store\.region .* is not the name of a region"):
        admin_client(moto_place.settings(region="us east"))
    settings = moto_place.settings(endpoint="http://minio_1:9000")
    open_store(settings)
    with pytest.raises(ConfigError, match=r"^botocore refuses store\.endpoint"):
        admin_client(settings)


VARIABLES = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"]


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("use", [open_store, admin_client])
def test_a_line_break_in_a_variable_of_the_chain_is_refused_by_name(
    moto_place: S3Place, variable: str, use: Callable[[StoreSettings], object], clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.delenv("AWS_DEFAULT_REGION", raising=False)
    clean_environment.setenv(variable, "hush\n")
    for client in ("obstore", "aioboto3"):
        unset = {"access_key_id": None, "secret_access_key": None, "region": None}
        with pytest.raises(ConfigError) as caught:
            use(moto_place.settings(client=client, **unset))
        assert str(caught.value) == f"{variable} must hold no control characters, such as a line break"
    use(moto_place.settings())  # nothing of the chain is used


async def test_a_line_break_in_other_keys_of_the_chain_is_no_panic(
    opened: Opener, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    answer = json.dumps({"Version": 1, "AccessKeyId": "hush\n", "SecretAccessKey": "s"})
    (tmp_path / "answer").write_text(answer)
    config.write_text(f"[profile broken]\ncredential_process = cat {tmp_path / 'answer'}\n")
    clean_environment.setenv("AWS_CONFIG_FILE", str(config))
    store = opened(client="obstore", access_key_id=None, secret_access_key=None, profile="broken")
    with pytest.raises(PermissionDenied, match="the AWS chain found keys with control characters") as caught:
        await store.put("k", b"x")
    assert_one_line(caught.value, opened.place, "store.access_key_id")
    assert opened.proxy.seen == []


def assert_one_line(error: BaseException, place: S3Place, setting: str) -> None:
    line = describe_failure(error, place.settings())
    assert setting in line
    assert "\n" not in line and "Traceback" not in line and len(line) < 400
    assert place.secret_key not in line
    assert json.dumps(line)
