"""Two instances of the module in one root, applied against moto, looked at with boto3, used, destroyed.

One test, since an apply takes a minute: the provider polls each lifecycle configuration for 55 s. Directory buckets and
Intelligent-Tiering do not re-plan cleanly under moto, and Pod Identity needs a cluster: these are tested at plan level
(`terraform/tests/complete.tftest.hcl`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from support.agents import FakeEngine, agent_settings, running_agent, small_spec
from support.command import Cli
from support.faulty_proxy import faulty_proxy
from support.servers import ACCESS_KEY, REGION, SECRET_KEY, boto3_client
from support.tls import make_ca_and_server

from s3kv.settings import load_settings
from s3kv.store.admin import BucketSpec, check_bucket, create_bucket, read_state

pytestmark = [pytest.mark.terraform, pytest.mark.slow]

MODULE = Path(__file__).parents[2] / "terraform"
OIDC = "oidc.eks.us-east-1.amazonaws.com/id/ABC"


def configuration(plain: str, full: str) -> str:
    return f"""
terraform {{
  required_providers {{
    aws = {{ source = "hashicorp/aws" }}
  }}
}}

provider "aws" {{}}

resource "aws_vpc" "this" {{
  cidr_block = "10.0.0.0/16"
}}

resource "aws_route_table" "this" {{
  vpc_id = aws_vpc.this.id
}}

module "plain" {{
  source        = "{MODULE}"
  bucket_name   = "{plain}"
  force_destroy = true
}}

module "full" {{
  source        = "{MODULE}"
  bucket_name   = "{full}"
  prefix        = "prod/s3kv"
  force_destroy = true
  tags          = {{ Team = "inference" }}
  encryption    = {{ algorithm = "aws:kms", create_kms_key = true }}
  transition    = {{ storage_class = "STANDARD_IA", days = 30 }}
  expiry_days          = 60
  lease_expiry_days    = 14
  abort_multipart_days = 2
  iam_path             = "/s3kv/"
  roles = {{
    node = {{
      irsa = {{
        oidc_provider_arn = "arn:aws:iam::123456789012:oidc-provider/{OIDC}"
        service_accounts  = ["inference:trtllm"]
      }}
      ec2 = true
    }}
    collector = {{ ec2 = true }}
  }}
  gateway_endpoint = {{ vpc_id = aws_vpc.this.id, route_table_ids = [aws_route_table.this.id] }}
  request_metrics  = true
  size_alarm       = {{ threshold_bytes = 1000000 }}
}}

output "plain" {{
  value = module.plain
}}

output "full" {{
  value = module.full
}}
"""


@pytest.fixture
def access(moto_server: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """`store` settings that lead to moto where those of the module lead to AWS. With TLS, which the policy asks for."""
    bundle, context = make_ca_and_server(tmp_path)
    with faulty_proxy(moto_server, context) as tls:
        yield {
            "endpoint": tls.endpoint,
            "ca_bundle": bundle,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }


class Provisioned:
    """A bucket of the module, used by way of the settings file that the module gives out."""

    def __init__(self, output: dict[str, Any], spec: BucketSpec, folder: Path, access: dict[str, Any]) -> None:
        self.spec, self.access = spec, access
        self.file = folder / f"{spec.name}.yaml"
        self.file.write_text(output["settings_yaml"])
        self.folder = folder / spec.name
        self.folder.mkdir()

    def cli(self, *arguments: str, **settings: Any) -> Cli:
        values = {f"store.{name}": value for name, value in self.access.items()} | settings
        sets = (word for name, value in values.items() for word in ("--set", f"{name}={value}"))
        return Cli("--config", str(self.file), *sets, *arguments)


def test_applied_agreeing_with_bucket_create_replanned_used_and_destroyed(
    terraform_at: Callable[[str], Any], moto_server: str, tmp_path: Path, access: dict[str, Any]
) -> None:
    run = uuid.uuid4().hex[:8]
    plain = BucketSpec(name=f"plain-{run}", region=REGION)
    terraform = terraform_at(configuration(plain.name, f"full-{run}"))
    client = boto3_client(moto_server)
    try:
        terraform("apply", "-auto-approve", "-input=false", "-no-color")
        outputs = terraform.outputs()
        full = BucketSpec(
            name=f"full-{run}",
            region=REGION,
            prefix="prod/s3kv",
            encryption="aws:kms",
            kms_key=outputs["full"]["kms_key_arn"],
            expiry_days=60,
            lease_expiry_days=14,
            abort_multipart_days=2,
            tags={"Application": "s3kv", "Team": "inference"},
        )
        buckets = [
            Provisioned(outputs[name], spec, tmp_path, access) for name, spec in (("plain", plain), ("full", full))
        ]
        for bucket in buckets:
            the_bucket_is_what_the_module_promises(client, bucket.spec)
            bucket_create_and_the_module_agree(client, bucket)
            bucket_check_is_content(bucket)
        the_settings_files_are_whole(outputs, buckets)
        the_roles_may_do_what_they_must(moto_server, outputs["full"], full)
        the_extras_are_there(moto_server, outputs["full"], full)

        plan = terraform("plan", "-detailed-exitcode", "-input=false", "-no-color", accept=(0, 2))
        assert plan.returncode == 0, f"not clean:\n{plan.stdout}"

        for bucket in buckets:
            with without_policy(client, bucket.spec.name):
                bucket_check_misses_the_policy(bucket)
                kv_is_stored_loaded_and_collected(client, bucket)
                if bucket.spec is full:
                    nothing_of_s3kv_stays(client, bucket)
    finally:
        terraform("destroy", "-auto-approve", "-input=false", "-no-color")
    assert not {plain.name, f"full-{run}"} & {each["Name"] for each in client.list_buckets()["Buckets"]}


def the_bucket_is_what_the_module_promises(client: Any, spec: BucketSpec) -> None:
    assert check_bucket(spec, client) == []
    assert check_bucket(BucketSpec(spec.name, spec.region, spec.prefix), client, exact=False) == []
    assert set(client.get_public_access_block(Bucket=spec.name)["PublicAccessBlockConfiguration"].values()) == {True}
    ownership = client.get_bucket_ownership_controls(Bucket=spec.name)["OwnershipControls"]["Rules"]
    assert ownership == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    assert "Status" not in client.get_bucket_versioning(Bucket=spec.name), "case 49: never versioned"

    encryption = client.get_bucket_encryption(Bucket=spec.name)["ServerSideEncryptionConfiguration"]["Rules"][0]
    assert encryption["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == spec.encryption
    assert encryption["ApplyServerSideEncryptionByDefault"].get("KMSMasterKeyID") == spec.kms_key
    assert encryption["BucketKeyEnabled"] == (spec.encryption == "aws:kms")

    rules = client.get_bucket_lifecycle_configuration(Bucket=spec.name)["Rules"]
    by_prefix = {each["Filter"]["Prefix"]: each for each in rules}
    assert {prefix: each.get("Expiration", {}).get("Days") for prefix, each in by_prefix.items()} == {
        f"{spec.prefix}/": None,
        f"{spec.prefix}/ns/": spec.expiry_days,
        f"{spec.prefix}/lease/": spec.lease_expiry_days,
        f"{spec.prefix}/s3kv-scratch/": 1,
    }
    abort = by_prefix[f"{spec.prefix}/"]["AbortIncompleteMultipartUpload"]
    assert abort == {"DaysAfterInitiation": spec.abort_multipart_days}, "case 48"

    policy = json.loads(client.get_bucket_policy(Bucket=spec.name)["Policy"])
    assert {(each["Effect"], each["Sid"]) for each in policy["Statement"]} == {
        ("Deny", "S3kvDenyInsecureTransport"),
        ("Deny", "S3kvDenyOldTls"),
    }


def bucket_create_and_the_module_agree(client: Any, bucket: Provisioned) -> None:
    spec = bucket.spec
    twin = BucketSpec(**{**vars(spec), "name": f"{spec.name}-twin"})
    key = ("--kms-key", spec.kms_key) if spec.kms_key else ()
    choices = ("--encryption", spec.encryption, *key, "--expiry-days", str(spec.expiry_days))
    bucket.cli("--store", f"s3://{twin.name}/{twin.prefix}")("bucket", "create", *choices).ok()
    rest = {"lifecycle", "tags"} if spec.lease_expiry_days != BucketSpec.lease_expiry_days else set()
    assert set(create_bucket(twin, client)) == rest, "days and tags that the command has no options for"

    assert as_if_named(read_state(twin, client), twin.name, spec.name) == read_state(spec, client)
    assert as_if_named(raw_state(client, twin.name), twin.name, spec.name) == raw_state(client, spec.name)

    client.delete_bucket(Bucket=twin.name)


def raw_state(client: Any, bucket: str) -> dict[str, Any]:
    """What S3 answers, not passed through s3kv, but for what is the owner's choice or has no order."""
    rules = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    for rule in rules:
        rule.pop("Transitions", None)
    policy = json.loads(client.get_bucket_policy(Bucket=bucket)["Policy"])
    for statement in policy["Statement"]:
        statement["Resource"].sort()
    return {
        "access": client.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"],
        "ownership": client.get_bucket_ownership_controls(Bucket=bucket)["OwnershipControls"],
        "encryption": client.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"],
        "policy": policy,
        "lifecycle": sorted(rules, key=lambda rule: rule["ID"]),
        "tags": sorted(client.get_bucket_tagging(Bucket=bucket)["TagSet"], key=lambda tag: tag["Key"]),
    }


def as_if_named(value: Any, name: str, other: str) -> Any:
    return json.loads(json.dumps(value).replace(name, other))


def bucket_check_is_content(bucket: Provisioned) -> None:
    assert bucket.cli()("bucket", "check", "--json").ok().json["findings"] == []
    exact = bucket.cli()("bucket", "check", "--exact", "--json")
    chosen = {each["property"].split(".")[0] for each in exact.json["findings"]}
    assert chosen == ({"encryption", "lifecycle"} if bucket.spec.kms_key else set())
    assert exact.code == (1 if chosen else 0)


def bucket_check_misses_the_policy(bucket: Provisioned) -> None:
    ran = bucket.cli()("bucket", "check", "--json")
    assert ran.code == 1
    assert {each["property"] for each in ran.json["findings"]} == {
        "policy.S3kvDenyInsecureTransport",
        "policy.S3kvDenyOldTls",
    }


def the_settings_files_are_whole(outputs: dict[str, Any], buckets: list[Provisioned]) -> None:
    for output, bucket in zip((outputs["plain"], outputs["full"]), buckets, strict=True):
        store, spec = load_settings(bucket.file).store, bucket.spec
        assert (store.url, store.region) == (f"s3://{spec.name}/{spec.prefix}", spec.region)
        assert yaml.safe_load(output["settings_yaml"])["store"]["url"] == output["store_url"]


def aws(service: str, endpoint: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


def the_roles_may_do_what_they_must(endpoint: str, output: dict[str, Any], spec: BucketSpec) -> None:
    iam = aws("iam", endpoint)
    assert set(output["role_arns"]) == {"node", "collector"}
    allowed = {}
    for name, arn in output["policy_arns"].items():
        version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
        document = iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]
        allowed[name] = {each["Sid"]: each for each in document["Statement"]}
        assert allowed[name]["Objects"]["Resource"] == f"arn:aws:s3:::{spec.name}/{spec.prefix}/*"
        assert allowed[name]["Key"]["Resource"] == spec.kms_key
        assert all(each["Effect"] == "Allow" for each in document["Statement"])
    assert {name for name, each in allowed.items() if "s3:DeleteObject" in each["Objects"]["Action"]} == {"collector"}
    assert allowed["reader"]["Objects"]["Action"] == "s3:GetObject"
    assert allowed["reader"]["Key"]["Action"] == "kms:Decrypt"

    role = f"{spec.name}-node"
    attached = iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    assert [each["PolicyArn"] for each in attached] == [output["policy_arns"]["node"]]
    trust = iam.get_role(RoleName=role)["Role"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust[0]["Condition"]["StringEquals"][f"{OIDC}:sub"] == "system:serviceaccount:inference:trtllm"
    profile = iam.get_instance_profile(InstanceProfileName=output["instance_profile_names"]["node"])["InstanceProfile"]
    assert [each["RoleName"] for each in profile["Roles"]] == [role]


def the_extras_are_there(endpoint: str, output: dict[str, Any], spec: BucketSpec) -> None:
    assert aws("kms", endpoint).get_key_rotation_status(KeyId=spec.kms_key)["KeyRotationEnabled"]
    (alarm,) = aws("cloudwatch", endpoint).describe_alarms(AlarmNames=[f"{spec.name}-size"])["MetricAlarms"]
    assert alarm["Threshold"] == 1_000_000
    found = aws("ec2", endpoint).describe_vpc_endpoints(VpcEndpointIds=[output["gateway_endpoint_id"]])
    assert found["VpcEndpoints"][0]["ServiceName"] == f"com.amazonaws.{REGION}.s3"


@contextmanager
def without_policy(client: Any, bucket: str) -> Iterator[None]:
    """moto ignores the conditions of a policy, so that ours would deny everything."""
    policy = client.get_bucket_policy(Bucket=bucket)["Policy"]
    client.delete_bucket_policy(Bucket=bucket)
    yield
    client.put_bucket_policy(Bucket=bucket, Policy=policy)


def kv_is_stored_loaded_and_collected(client: Any, bucket: Provisioned) -> None:
    """By an agent, an engine and the commands. The catalog stays behind: in the plain bucket `force_destroy` has to
    take it along."""
    store = load_settings(bucket.file, store=bucket.access).store.model_dump(exclude_unset=True)
    settings = agent_settings(bucket.folder, store=store)
    cli = bucket.cli(**{"agent.socket": settings.agent.socket, "collect.grace_s": 0})
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, small_spec())
        agent.until(agent.namespace(small_spec()).catalog_open.is_set)  # else it may list the log just before it stores
        chain = engine.chain(1, 4)
        engine.save(chain)
        assert cli("agent", "drain", "--wait", "30s", "--json").ok().json["unsaved_blocks"] == 0
        stored = chunks_in(client, bucket.spec)
        assert stored

        assert cli("agent", "forget", "--json").ok().json == {"blocks": 4}
        assert engine.load(chain) == 4
        assert agent.totals().total(agent.totals().fetched_blocks) == 4

        ran = cli("gc", "--max-bytes", "1", "--yes", "--json").ok().json
        assert (ran["deleted"]["objects"], ran["failures"]) == (len(stored), [])
        assert chunks_in(client, bucket.spec) == []
        cli("agent", "forget").ok()
        assert engine.load(chain) == 0
        engine.close()
    assert client.list_objects_v2(Bucket=bucket.spec.name)["KeyCount"] > 0


def nothing_of_s3kv_stays(client: Any, bucket: Provisioned) -> None:
    """moto takes the deletion of request metrics for that of the bucket, and refuses it while an object is in there."""
    bucket.cli()("bucket", "delete", "--everything", "--yes").ok()
    assert client.list_objects_v2(Bucket=bucket.spec.name)["KeyCount"] == 0


def chunks_in(client: Any, spec: BucketSpec) -> list[str]:
    found = client.list_objects_v2(Bucket=spec.name, Prefix=f"{spec.prefix}/ns/").get("Contents", [])
    return [each["Key"] for each in found if "/chunk/" in each["Key"]]
