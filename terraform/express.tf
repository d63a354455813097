# A directory bucket. Public access to it is always blocked, ownership always enforced, transport always TLS, encryption
# always on, and it knows no versions: what is left to set is the lifecycle.
resource "aws_s3_directory_bucket" "this" {
  count = var.express == null ? 0 : 1

  bucket        = local.express_name
  force_destroy = var.force_destroy

  location {
    name = var.express.zone_id
  }
}

# On directory buckets S3's own lifecycle has to be let in, or it silently deletes nothing.
data "aws_iam_policy_document" "express" {
  count = var.express == null ? 0 : 1

  statement {
    sid       = "S3kvLetLifecycleDelete"
    actions   = ["s3express:CreateSession"]
    resources = [local.express_arn]

    principals {
      type        = "Service"
      identifiers = ["lifecycle.s3.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "s3express:SessionMode"
      values   = ["ReadWrite"]
    }
  }
}

resource "aws_s3_bucket_policy" "express" {
  count = var.express == null ? 0 : 1

  bucket = aws_s3_directory_bucket.this[0].bucket
  policy = data.aws_iam_policy_document.express[0].json
}

# The bucket's rules without the transition: a directory bucket has one storage class.
resource "aws_s3_bucket_lifecycle_configuration" "express" {
  #checkov:skip=CKV_AWS_300:The rule is there, for all that s3kv writes; the check wants it without a prefix, but whatever else is in the bucket is not s3kv's to delete.
  count = var.express == null ? 0 : 1

  bucket = aws_s3_directory_bucket.this[0].bucket

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

  dynamic "rule" {
    for_each = { cache = { folder = "ns/", days = var.expiry_days }, leases = { folder = "lease/", days = var.lease_expiry_days }, scratch = { folder = "s3kv-scratch/", days = 1 } }

    content {
      id     = "s3kv-expire-${rule.key}${local.rule_suffix}"
      status = "Enabled"

      filter {
        prefix = "${local.key_prefix}${rule.value.folder}"
      }

      expiration {
        days = rule.value.days
      }
    }
  }

  depends_on = [aws_s3_bucket_policy.express]
}
