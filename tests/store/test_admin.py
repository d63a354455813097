"""Creating and checking buckets, against moto and SeaweedFS, and the translation of botocore's errors."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.stub import Stubber
from support.servers import boto3_client

from s3kv.errors import ConfigError, PermissionDenied, StoreMisconfigured, Transient
from s3kv.store.admin import UNSUPPORTED, BucketSpec, check_bucket, create_bucket, desired_state, read_state
from s3kv.store.bucket_spec import lifecycle_rules

PROPERTIES = ["public_access_block", "ownership", "encryption", "policy", "lifecycle", "tags"]


@pytest.fixture
def client(moto_server: str) -> Any:
    return boto3_client(moto_server)


@pytest.fixture
def spec() -> BucketSpec:
    return BucketSpec(name=f"admin-{uuid.uuid4().hex[:12]}", region="us-east-1")


def names_of(findings: list[Any]) -> list[str]:
    return [finding.property for finding in findings]


def test_create_makes_every_property_and_a_second_call_changes_nothing(client: Any, spec: BucketSpec) -> None:
    changed = create_bucket(spec, client)

    assert changed[0] == "bucket"
    assert set(PROPERTIES) - {"encryption"} <= set(changed)  # SSE-S3 is there from the start
    assert read_state(spec, client) == desired_state(spec)
    assert check_bucket(spec, client) == []
    assert create_bucket(spec, client) == []


def test_create_with_a_kms_key_in_another_region(moto_server: str, spec: BucketSpec) -> None:
    client = boto3_client(moto_server, region="eu-west-1")
    key = "arn:aws:kms:eu-west-1:123456789012:key/0a1b"
    wanted = replace(spec, region="eu-west-1", encryption="aws:kms", kms_key=key, prefix="prod/s3kv")

    create_bucket(wanted, client)

    assert check_bucket(wanted, client) == []
    rule = client.get_bucket_encryption(Bucket=spec.name)["ServerSideEncryptionConfiguration"]["Rules"][0]
    assert rule == {
        "ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key},
        "BucketKeyEnabled": True,
    }


def test_check_of_a_bare_bucket_names_every_property_with_a_remedy_and_changes_nothing(
    client: Any, spec: BucketSpec
) -> None:
    client.create_bucket(Bucket=spec.name)

    findings = check_bucket(spec, client)

    assert {name.split(".")[0] for name in names_of(findings)} >= set(PROPERTIES) - {"encryption"}
    assert all(finding.remedy and finding.expected != finding.found for finding in findings)
    assert check_bucket(spec, client) == findings


def test_case_48_the_bucket_carries_the_rule_that_aborts_multipart_uploads(client: Any, spec: BucketSpec) -> None:
    create_bucket(spec, client)
    rules = {each["ID"]: each for each in client.get_bucket_lifecycle_configuration(Bucket=spec.name)["Rules"]}

    abort = rules.pop("s3kv-abort-multipart-s3kv")
    assert abort["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}

    client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": list(rules.values())})
    assert names_of(check_bucket(spec, client)) == ["lifecycle.s3kv-abort-multipart-s3kv"]
    assert create_bucket(spec, client) == ["lifecycle"]


def test_case_49_a_versioned_bucket_is_a_finding_and_is_not_taken_over(client: Any, spec: BucketSpec) -> None:
    create_bucket(spec, client)
    client.put_bucket_versioning(Bucket=spec.name, VersioningConfiguration={"Status": "Enabled"})
    client.delete_public_access_block(Bucket=spec.name)

    assert set(names_of(check_bucket(spec, client))) == {"versioning", "public_access_block"}
    with pytest.raises(ConfigError, match="versioned"):
        create_bucket(spec, client)
    assert "public_access_block" in names_of(check_bucket(spec, client)), "nothing was changed"


def test_what_others_set_on_a_shared_bucket_is_kept(client: Any, spec: BucketSpec) -> None:
    client.create_bucket(Bucket=spec.name)
    foreign = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}
    statement = {"Sid": "Theirs", "Effect": "Allow", "Principal": {"AWS": "123456789012"}}
    statement |= {"Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{spec.name}/*"}
    client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": [foreign]})
    client.put_bucket_policy(Bucket=spec.name, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    client.put_bucket_tagging(Bucket=spec.name, Tagging={"TagSet": [{"Key": "Owner", "Value": "them"}]})

    create_bucket(spec, client)
    create_bucket(replace(spec, prefix="second"), client)

    state = read_state(spec, client)
    assert {"theirs", "s3kv-expire-cache-s3kv", "s3kv-expire-cache-second"} <= set(state["lifecycle"])
    assert "Theirs" in state["policy"]
    assert state["tags"] == {"Owner": "them", "Application": "s3kv"}
    assert check_bucket(spec, client) == []


def rules_of(client: Any, spec: BucketSpec) -> dict[str, Any]:
    """Prefix -> rule, which is there once."""
    rules = client.get_bucket_lifecycle_configuration(Bucket=spec.name)["Rules"]
    by_prefix = {each["Filter"]["Prefix"]: each for each in rules}
    assert len(by_prefix) == len(rules)
    return by_prefix


def test_prefixes_that_differ_by_a_slash_have_rules_of_their_own(client: Any, spec: BucketSpec) -> None:
    specs = [replace(spec, prefix=prefix) for prefix in ("team/kv", "team-kv", "team-kv/x", "team/kv-x", "team/kv/x")]
    for each in specs:
        create_bucket(each, client)
    assert len(rules_of(client, spec)) == 4 * len(specs)
    for each in specs:
        assert check_bucket(each, client) == []
        assert create_bucket(each, client) == []
    assert specs[1].rule_id("expire-cache") == "s3kv-expire-cache-team-kv", "as it always was"


def with_older_names(spec: BucketSpec) -> list[dict[str, Any]]:
    digest = spec.rule_id("expire-cache")[-9:]
    return [{**each, "ID": each["ID"].removesuffix(digest)} for each in lifecycle_rules(spec)]


@pytest.mark.parametrize("prefix", ["team/kv", "team-kv"])
def test_rules_with_names_from_before_digests_are_renamed_and_not_doubled(
    client: Any, spec: BucketSpec, prefix: str
) -> None:
    older = replace(spec, prefix="team/kv", expiry_days=30)
    client.create_bucket(Bucket=spec.name)
    rules = with_older_names(older)
    assert rules[1]["ID"] == "s3kv-expire-cache-team-kv"
    rules[1]["Transitions"] = [{"Days": 10, "StorageClass": "INTELLIGENT_TIERING"}]
    client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": rules})

    assert "lifecycle" in create_bucket(replace(older, prefix=prefix), client)

    found = rules_of(client, spec)
    assert len(found) == (4 if prefix == "team/kv" else 8)
    assert found["team/kv/ns/"]["ID"] == older.rule_id("expire-cache")
    assert found["team/kv/ns/"]["Expiration"]["Days"] == 30
    assert found["team/kv/ns/"]["Transitions"] == rules[1]["Transitions"]
    assert check_bucket(older, client, exact=False) == []


def test_at_the_root_of_a_bucket_only_rules_for_what_s3kv_keeps_are_found(client: Any, spec: BucketSpec) -> None:
    root = replace(spec, prefix="")
    create_bucket(root, client)
    rules = client.get_bucket_lifecycle_configuration(Bucket=spec.name)["Rules"]
    for prefix in ("logs/", "nsx/", "ns/abc", "lease/x/", "form", ""):
        rule = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": 3}}
        client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": [*rules, rule]})
        found = names_of(check_bucket(root, client))
        assert found == ([] if prefix in ("logs/", "nsx/") else ["lifecycle.theirs"])


def test_a_transition_is_the_owners_choice_and_survives(client: Any, spec: BucketSpec) -> None:
    create_bucket(spec, client)
    rules = lifecycle_rules(replace(spec, expiry_days=60))
    rules[1]["Transitions"] = [{"Days": 30, "StorageClass": "STANDARD_IA"}]
    client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": rules})

    assert create_bucket(spec, client) == ["lifecycle"]

    rule = client.get_bucket_lifecycle_configuration(Bucket=spec.name)["Rules"][1]
    assert (rule["Expiration"]["Days"], rule["Transitions"]) == (90, [{"Days": 30, "StorageClass": "STANDARD_IA"}])


@pytest.mark.parametrize(
    "action", [{"Expiration": {"Days": 7}}, {"Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}]
)
def test_a_foreign_rule_that_takes_objects_away_is_found(client: Any, spec: BucketSpec, action: dict[str, Any]) -> None:
    create_bucket(spec, client)
    rules = client.get_bucket_lifecycle_configuration(Bucket=spec.name)["Rules"]
    rules.append({"ID": "all", "Status": "Enabled", "Filter": {"Prefix": ""}, **action})
    client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": rules})

    assert names_of(check_bucket(spec, client)) == ["lifecycle.all"]


def test_a_lenient_check_accepts_other_choices_but_not_none(client: Any, spec: BucketSpec) -> None:
    chosen = replace(spec, expiry_days=10, encryption="aws:kms", tags={})
    create_bucket(chosen, client)

    assert check_bucket(spec, client) != []
    assert check_bucket(spec, client, exact=False) == []

    rules = lifecycle_rules(chosen)
    rules[1]["Status"] = "Disabled"
    client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": rules})
    assert names_of(check_bucket(spec, client, exact=False)) == ["lifecycle.s3kv-expire-cache-s3kv"]


def test_a_missing_bucket_and_a_wrong_region_are_one_sentence_naming_the_setting(client: Any, spec: BucketSpec) -> None:
    with pytest.raises(StoreMisconfigured, match=rf'bucket "{spec.name}" does not exist: set store.url'):
        check_bucket(spec, client)

    client.create_bucket(Bucket=spec.name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    message = (
        f'bucket "{spec.name}" is in eu-west-1, not us-east-1: set store.region .or S3KV_STORE__REGION. to eu-west-1'
    )
    with pytest.raises(StoreMisconfigured, match=message):
        create_bucket(spec, client)
    assert "region" in names_of(check_bucket(spec, client))


@pytest.mark.parametrize(
    ("code", "status", "kind", "names"),
    [
        ("AccessDenied", 403, PermissionDenied, "not allowed"),
        ("SignatureDoesNotMatch", 403, PermissionDenied, "store.secret_access_key"),
        ("RequestTimeTooSkewed", 403, StoreMisconfigured, "clock"),
        ("AuthorizationHeaderMalformed", 400, StoreMisconfigured, "store.region"),
        ("InternalError", 500, Transient, "for now"),
    ],
)
def test_refusals_are_translated(spec: BucketSpec, code: str, status: int, kind: type[Exception], names: str) -> None:
    client = boto3_client("http://127.0.0.1:9")
    with Stubber(client) as stub:
        stub.add_client_error("get_bucket_location", code, http_status_code=status)
        with pytest.raises(kind, match=names) as caught:
            create_bucket(spec, client)
    assert caught.value.__cause__ is not None


def test_an_endpoint_that_nobody_listens_at_and_missing_credentials(
    spec: BucketSpec, clean_environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreMisconfigured, match=r"store\.endpoint"):
        check_bucket(spec, boto3_client("http://127.0.0.1:9"))

    clean_environment.delenv("AWS_ACCESS_KEY_ID")
    clean_environment.delenv("AWS_SECRET_ACCESS_KEY")
    session = boto3.Session()
    nobody = session.client("s3", region_name="us-east-1", endpoint_url="http://127.0.0.1:9", config=Config())
    with pytest.raises(PermissionDenied, match=r"store\.access_key_id"):
        check_bucket(spec, nobody)


@pytest.mark.parametrize(
    "given", [{"aws_access_key_id": "hush\n"}, {"config": Config(proxies={"http": "http://user:hush@127.0.0.1:9"})}]
)
def test_no_secret_that_botocore_chokes_on_is_repeated(spec: BucketSpec, given: dict[str, Any]) -> None:
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    client = boto3.client("s3", region_name="us-east-1", endpoint_url="http://127.0.0.1:9", **{**keys, **given})
    with pytest.raises(StoreMisconfigured, match=r"cannot be reached: .* \(store\.endpoint\)") as caught:
        check_bucket(spec, client)
    assert "hush" not in str(caught.value)


def test_a_change_that_s3_refuses_for_now_is_tried_again(
    client: Any, spec: BucketSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_bucket(Bucket=spec.name)
    real, refusals, pauses = client.put_bucket_policy, [1, 2], []

    def busy(**arguments: Any) -> Any:
        if refusals:
            refusals.pop()
            raise client.exceptions.ClientError(
                {"Error": {"Code": "OperationAborted"}, "ResponseMetadata": {"HTTPStatusCode": 409}}, "PutBucketPolicy"
            )
        return real(**arguments)

    monkeypatch.setattr(client, "put_bucket_policy", busy)
    assert "policy" in create_bucket(spec, client, sleep=pauses.append)
    assert len(pauses) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"name": "Not.A.Bucket"},
        {"name": "cache--use1-az4--x-s3"},
        {"prefix": "a//b"},
        {"kms_key": "arn:aws:kms:us-east-1:123456789012:key/x"},
        {"expiry_days": 0},
        {"abort_multipart_days": 0},
    ],
)
def test_contradictory_specs_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BucketSpec(**{"name": "fine-name", "region": "us-east-1", **values})


def test_seaweedfs_gets_what_it_offers_and_the_rest_is_a_finding(seaweedfs: str, spec: BucketSpec) -> None:
    client = boto3_client(seaweedfs)
    wanted = replace(spec, tls_only=False)

    create_bucket(wanted, client)

    state = read_state(wanted, client)
    offered = [name for name, value in state.items() if value != UNSUPPORTED]
    findings = check_bucket(wanted, client)
    assert {finding.found for finding in findings if finding.property.split(".")[0] not in offered} <= {UNSUPPORTED}
    assert create_bucket(wanted, client) == [], findings
