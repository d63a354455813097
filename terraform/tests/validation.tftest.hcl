# What variables refuse, before anything is planned. Several at once, since each run starts the provider anew.

provider "aws" {
  region                      = "us-east-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
}

variables {
  bucket_name = "s3kv-test-validation"
}

run "dots_slashes_keys_without_kms_odd_days_unknown_roles" {
  command = plan

  variables {
    bucket_name = "my.bucket"
    prefix      = "s3kv/"
    encryption  = { create_kms_key = true }
    expiry_days = 1.5
    roles       = { admin = { ec2 = true } }
  }

  expect_failures = [
    var.bucket_name, var.prefix, var.encryption, var.expiry_days, var.roles,
  ]
}

run "reserved_names_wildcards_aliases_archives_roles_nobody_may_assume" {
  command = plan

  variables {
    bucket_name = "cache--use1-az4--x-s3"
    prefix      = "*"
    encryption  = { algorithm = "aws:kms", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:alias/x" }
    transition  = { storage_class = "GLACIER" }
    roles       = { node = {} }
  }

  expect_failures = [var.bucket_name, var.prefix, var.encryption, var.transition, var.roles]
}

run "wildcard_service_accounts_early_transition_zone_names" {
  command = plan

  variables {
    transition = { storage_class = "STANDARD_IA", days = 7 }
    roles      = { node = { pod_identity = { cluster_name = "gpu", service_accounts = ["inference:*"] } } }
    express    = { zone_id = "us-east-1a" }
  }

  expect_failures = [var.transition, var.roles, var.express]
}

run "transition_after_expiry" {
  command = plan

  variables {
    transition = { storage_class = "GLACIER_IR", days = 90 }
  }

  expect_failures = [var.transition]
}
