# Every option, planned only: moto re-plans neither directory buckets nor Intelligent-Tiering cleanly, so the apply test
# leaves these two out, and this file is where they are tested.

provider "aws" {
  region                      = "cn-north-1" # a partition of its own
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current[0]
  values = { account_id = "123456789012" }
}

variables {
  bucket_name   = "s3kv-test-complete"
  prefix        = "prod/s3kv"
  force_destroy = true
  tags          = { Team = "inference", Application = "mine" }
  encryption    = { algorithm = "aws:kms", kms_key_arn = "arn:aws-cn:kms:cn-north-1:123456789012:key/abc" }
  transition    = { storage_class = "INTELLIGENT_TIERING", days = 0 }
  roles = {
    node = {
      irsa = {
        oidc_provider_arn = "arn:aws-cn:iam::123456789012:oidc-provider/oidc.eks.cn-north-1.amazonaws.com.cn/id/ABC"
        service_accounts  = ["inference:trtllm"]
      }
      ec2 = true
    }
    collector = { pod_identity = { cluster_name = "gpu", service_accounts = ["inference:s3kv-gc"] } }
  }
  gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"] }
  express          = { zone_id = "cnn1-az1" }
  request_metrics  = true
  size_alarm       = { threshold_bytes = 1000, alarm_actions = ["arn:aws-cn:sns:cn-north-1:123456789012:ops"] }
}

run "encryption_and_its_grants" {
  command = plan

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this.rule).bucket_key_enabled
    error_message = "bucket key"
  }
  assert {
    condition     = jsondecode(output.policy_documents["reader"]).Statement[2].Action == "kms:Decrypt"
    error_message = "a reader only decrypts"
  }
  assert {
    condition     = jsondecode(output.policy_documents["node"]).Statement[2].Condition.StringEquals["kms:ViaService"] == "s3.cn-north-1.amazonaws.com.cn"
    error_message = "the key serves S3 only"
  }
}

run "a_key_of_its_own" {
  command = plan

  variables {
    encryption = { algorithm = "aws:kms", create_kms_key = true }
  }

  assert {
    condition     = aws_kms_key.this[0].enable_key_rotation && aws_kms_alias.this[0].name == "alias/s3kv/s3kv-test-complete"
    error_message = "key"
  }
  assert {
    condition     = jsondecode(aws_kms_key.this[0].policy).Statement[0].Principal.AWS == "arn:aws-cn:iam::123456789012:root"
    error_message = "key policy"
  }
}

run "intelligent_tiering" {
  command = plan

  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.this.rule : rule.id if length(rule.transition) > 0] == ["s3kv-expire-cache-prod-s3kv-2eb59af5"]
    error_message = "only the cache is moved"
  }
  assert {
    condition     = one(aws_s3_bucket_lifecycle_configuration.this.rule[1].transition).storage_class == "INTELLIGENT_TIERING"
    error_message = "storage class"
  }
}

run "roles_and_their_trust" {
  command = plan

  assert {
    condition = jsondecode(aws_iam_role.this["node"].assume_role_policy).Statement[0].Condition.StringEquals == {
      "oidc.eks.cn-north-1.amazonaws.com.cn/id/ABC:aud" = "sts.amazonaws.com"
      "oidc.eks.cn-north-1.amazonaws.com.cn/id/ABC:sub" = "system:serviceaccount:inference:trtllm"
    }
    error_message = "IRSA trusts one service account"
  }
  assert {
    condition     = jsondecode(aws_iam_role.this["node"].assume_role_policy).Statement[1].Principal.Service == "ec2.amazonaws.com.cn"
    error_message = "EC2"
  }
  assert {
    condition     = jsondecode(aws_iam_role.this["collector"].assume_role_policy).Statement[0].Action == ["sts:TagSession", "sts:AssumeRole"]
    error_message = "Pod Identity"
  }
  assert {
    condition     = aws_eks_pod_identity_association.this["collector/inference:s3kv-gc"].service_account == "s3kv-gc"
    error_message = "Pod Identity association"
  }
  assert {
    condition     = keys(aws_iam_instance_profile.this) == ["node"]
    error_message = "an instance profile where EC2 is trusted, and nowhere else"
  }
  assert {
    condition     = aws_iam_role.this["node"].tags == tomap({ Team = "inference", Application = "mine" })
    error_message = "the caller's tags win"
  }
}

run "express_endpoint_metrics_alarm" {
  command = plan

  assert {
    condition     = aws_s3_directory_bucket.this[0].bucket == "s3kv-test-complete--cnn1-az1--x-s3"
    error_message = "directory bucket"
  }
  assert {
    condition     = yamldecode(output.express_settings_yaml).store.url == "s3://s3kv-test-complete--cnn1-az1--x-s3/prod/s3kv"
    error_message = "express_settings_yaml"
  }
  assert {
    condition     = jsondecode(output.policy_documents["reader"]).Statement[3].Condition.StringEquals["s3express:SessionMode"] == "ReadOnly"
    error_message = "a reader's session is read-only"
  }
  assert {
    condition     = jsondecode(output.policy_documents["node"]).Statement[3].Resource == "arn:aws-cn:s3express:cn-north-1:123456789012:bucket/s3kv-test-complete--cnn1-az1--x-s3"
    error_message = "ARN of the directory bucket"
  }
  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.express[0].rule : "${rule.id} ${rule.filter[0].prefix}"] == ["s3kv-abort-multipart-prod-s3kv-2eb59af5 prod/s3kv/", "s3kv-expire-cache-prod-s3kv-2eb59af5 prod/s3kv/ns/", "s3kv-expire-leases-prod-s3kv-2eb59af5 prod/s3kv/lease/", "s3kv-expire-scratch-prod-s3kv-2eb59af5 prod/s3kv/s3kv-scratch/"]
    error_message = "lifecycle of the directory bucket"
  }
  assert {
    condition     = jsondecode(aws_s3_bucket_policy.express[0].policy).Statement[0].Principal.Service == "lifecycle.s3.amazonaws.com"
    error_message = "the lifecycle may delete"
  }
  assert {
    condition     = aws_vpc_endpoint.this[0].service_name == "com.amazonaws.cn-north-1.s3" && aws_vpc_endpoint.this[0].vpc_endpoint_type == "Gateway"
    error_message = "gateway endpoint"
  }
  assert {
    condition     = aws_s3_bucket_metric.this[0].filter[0].prefix == "prod/s3kv/"
    error_message = "request metrics"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.size[0].threshold == 1000 && length(aws_cloudwatch_metric_alarm.size[0].metric_query) == 8
    error_message = "size alarm"
  }
}
