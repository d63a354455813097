# What a caller gets who sets nothing but a name. Planned with the real provider; no request leaves the machine.

provider "aws" {
  region                      = "eu-central-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
}

variables {
  bucket_name = "s3kv-test-defaults"
}

run "bucket_is_private_encrypted_and_unversioned" {
  command = plan

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this.block_public_acls,
      aws_s3_bucket_public_access_block.this.block_public_policy,
      aws_s3_bucket_public_access_block.this.ignore_public_acls,
      aws_s3_bucket_public_access_block.this.restrict_public_buckets,
    ])
    error_message = "public access is not blocked"
  }
  assert {
    condition     = aws_s3_bucket_ownership_controls.this.rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "ownership is not enforced"
  }
  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default[0].sse_algorithm == "AES256"
    error_message = "SSE-S3 is the default"
  }
  assert {
    condition     = aws_s3_bucket.this.force_destroy == false
    error_message = "a bucket with objects must not be destroyed unasked"
  }
  assert {
    condition     = aws_s3_bucket.this.tags == tomap({ Application = "s3kv" })
    error_message = "tags"
  }
}

run "policies_are_known_at_plan_time" {
  command = plan

  assert {
    condition     = jsondecode(aws_s3_bucket_policy.this.policy).Statement[*].Sid == ["S3kvDenyInsecureTransport", "S3kvDenyOldTls"]
    error_message = "plain HTTP and old TLS are denied"
  }
  assert {
    condition = toset(flatten([
      for statement in jsondecode(output.policy_documents["node"]).Statement : statement.Action
    ])) == toset(["s3:GetBucketLocation", "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"])
    error_message = "a node reads and writes, and nothing else"
  }
  assert {
    condition     = [for name, document in output.policy_documents : name if strcontains(document, "Delete")] == ["collector"]
    error_message = "only the collector deletes"
  }
  assert {
    condition     = [for name, document in output.policy_documents : name if strcontains(document, "s3:PutObject")] == ["collector", "node"]
    error_message = "a reader does not write"
  }
  assert {
    condition     = alltrue([for document in values(output.policy_documents) : jsondecode(document).Statement[1].Resource == "arn:aws:s3:::s3kv-test-defaults/s3kv/*"])
    error_message = "objects outside the prefix are out of reach"
  }
}

run "lifecycle_is_the_backstop" {
  command = plan

  assert {
    condition = [for rule in aws_s3_bucket_lifecycle_configuration.this.rule : "${rule.id}=${try(rule.expiration[0].days, "none")}"] == [
      "s3kv-abort-multipart-s3kv=none", "s3kv-expire-cache-s3kv=90", "s3kv-expire-leases-s3kv=30",
      "s3kv-expire-scratch-s3kv=1",
    ]
    error_message = "expiry days"
  }
  # case 48
  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.this.rule[0].abort_incomplete_multipart_upload[0].days_after_initiation == 1
    error_message = "incomplete multipart uploads are aborted after a day"
  }
}

run "settings_name_bucket_prefix_and_region" {
  command = plan

  assert {
    condition     = yamldecode(output.settings_yaml) == { store = { url = "s3://s3kv-test-defaults/s3kv", region = "eu-central-1" } }
    error_message = "settings_yaml"
  }
  assert {
    condition     = output.express_settings_yaml == null && output.kms_key_arn == null
    error_message = "nothing that was not asked for"
  }
}

run "the_root_of_the_bucket_as_prefix" {
  command = plan

  variables {
    prefix = ""
  }

  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.this.rule : rule.id] == ["s3kv-abort-multipart", "s3kv-expire-cache", "s3kv-expire-leases", "s3kv-expire-scratch"]
    error_message = "rule names"
  }
  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.this.rule[1].filter[0].prefix == "ns/"
    error_message = "prefix"
  }
  assert {
    condition     = output.store_url == "s3://s3kv-test-defaults"
    error_message = "url"
  }
}
