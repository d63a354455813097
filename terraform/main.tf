data "aws_partition" "current" {}

# Knows the region under one name in every version of the provider: `name` of aws_region is deprecated in 6, `region` is
# not there in 5. Asks nobody.
data "aws_service" "s3" {
  service_id = "s3"
}

# Asked only where the account's number is part of a name, so that the rest can be planned without credentials.
data "aws_caller_identity" "current" {
  count = var.encryption.create_kms_key || var.express != null ? 1 : 0
}

locals {
  partition  = data.aws_partition.current.partition
  dns_suffix = data.aws_partition.current.dns_suffix
  region     = data.aws_service.s3.region
  account_id = one(data.aws_caller_identity.current[*].account_id)

  # Built from names: known at plan time, before anything exists.
  bucket_arn = "arn:${local.partition}:s3:::${var.bucket_name}"
  key_prefix = var.prefix == "" ? "" : "${var.prefix}/"
  # As BucketSpec.rule_id in s3kv/store/bucket_spec.py: the digest tells a/b from a-b.
  rule_digest = strcontains(var.prefix, "/") ? "-${substr(sha256(var.prefix), 0, 8)}" : ""
  rule_suffix = var.prefix == "" ? "" : "-${replace(var.prefix, "/", "-")}${local.rule_digest}"

  kms_key_arn = var.encryption.create_kms_key ? one(aws_kms_key.this[*].arn) : var.encryption.kms_key_arn

  express_name = var.express == null ? null : "${var.bucket_name}--${var.express.zone_id}--x-s3"
  express_arn  = var.express == null ? null : "arn:${local.partition}:s3express:${local.region}:${local.account_id}:bucket/${local.express_name}"

  tags = merge({ Application = "s3kv" }, var.tags)
}

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_18:An access log of every GET would cost more than it tells about a cache; request_metrics and CloudTrail data events are there.
  #checkov:skip=CKV_AWS_19:The check does not follow the algorithm through the module's variable; aws_s3_bucket_server_side_encryption_configuration.this sets it, validated, and the apply test reads it back.
  #checkov:skip=CKV_AWS_21:Keys name immutable content that can be computed again; old versions would only be paid for, and keep the bucket from being destroyed.
  #checkov:skip=CKV_AWS_144:A cache is not worth a copy in another region; what is lost is computed again.
  #checkov:skip=CKV_AWS_145:SSE-S3 is the default on purpose: encryption.algorithm chooses KMS where keys have to be managed.
  #checkov:skip=CKV2_AWS_62:Nothing listens: agents follow the catalog log in the bucket.
  bucket        = var.bucket_name
  force_destroy = var.force_destroy
  tags          = local.tags
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }

  # S3 refuses two changes to a bucket's settings at once (409 OperationAborted): one after the other.
  depends_on = [aws_s3_bucket_public_access_block.this]
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    bucket_key_enabled = var.encryption.algorithm == "aws:kms" && var.encryption.bucket_key

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.encryption.algorithm
      kms_master_key_id = local.kms_key_arn
    }
  }
}

data "aws_iam_policy_document" "bucket" {
  source_policy_documents = var.bucket_policy_documents

  statement {
    sid       = "S3kvDenyInsecureTransport"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [local.bucket_arn, "${local.bucket_arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  statement {
    sid       = "S3kvDenyOldTls"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [local.bucket_arn, "${local.bucket_arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "NumericLessThan"
      variable = "s3:TlsVersion"
      values   = ["1.2"]
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = data.aws_iam_policy_document.bucket.json

  depends_on = [aws_s3_bucket_ownership_controls.this]
}

# A lifecycle filter takes a fixed prefix, and in <prefix>/ns/<namespace>/chunk/... the namespace varies before the kind
# of object: one age for all of them. README.md, "Lifecycle", says why that is safe and what it asks of agents.
resource "aws_s3_bucket_lifecycle_configuration" "this" {
  #checkov:skip=CKV_AWS_300:The rule is there, for all that s3kv writes; the check wants it without a prefix, but whatever else is in the bucket is not s3kv's to delete.
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "s3kv-abort-multipart${local.rule_suffix}"
    status = "Enabled"

    filter {
      prefix = local.key_prefix
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = var.abort_multipart_days
    }
  }

  rule {
    id     = "s3kv-expire-cache${local.rule_suffix}"
    status = "Enabled"

    filter {
      prefix = "${local.key_prefix}ns/"
    }

    expiration {
      days = var.expiry_days
    }

    dynamic "transition" {
      for_each = var.transition[*]

      content {
        days          = transition.value.days
        storage_class = transition.value.storage_class
      }
    }
  }

  rule {
    id     = "s3kv-expire-leases${local.rule_suffix}"
    status = "Enabled"

    filter {
      prefix = "${local.key_prefix}lease/"
    }

    expiration {
      days = var.lease_expiry_days
    }
  }

  # Nodes may not delete what they put there to try the store out.
  rule {
    id     = "s3kv-expire-scratch${local.rule_suffix}"
    status = "Enabled"

    filter {
      prefix = "${local.key_prefix}s3kv-scratch/"
    }

    expiration {
      days = 1
    }
  }

  depends_on = [aws_s3_bucket_policy.this]
}
