data "aws_iam_policy_document" "kms" {
  count = var.encryption.create_kms_key ? 1 : 0

  # Leaves the decision to IAM: the three policies name the key. Without it nobody could manage the key.
  statement {
    #checkov:skip=CKV_AWS_109:In a key's policy "*" is this key alone.
    #checkov:skip=CKV_AWS_111:In a key's policy "*" is this key alone.
    #checkov:skip=CKV_AWS_356:In a key's policy "*" is this key alone.
    sid       = "AccountAdministersKey"
    actions   = ["kms:*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = ["arn:${local.partition}:iam::${local.account_id}:root"]
    }
  }
}

resource "aws_kms_key" "this" {
  count = var.encryption.create_kms_key ? 1 : 0

  description             = "s3kv objects in ${var.bucket_name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.kms[0].json
  tags                    = local.tags
}

resource "aws_kms_alias" "this" {
  count = var.encryption.create_kms_key ? 1 : 0

  name          = "alias/s3kv/${var.bucket_name}"
  target_key_id = aws_kms_key.this[0].key_id
}
