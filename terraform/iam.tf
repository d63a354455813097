locals {
  iam_name_prefix = coalesce(var.iam_name_prefix, trim(substr(var.bucket_name, 0, 54), "-"))

  read_actions  = ["s3:GetObject"]
  write_actions = ["s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]

  # What `s3kv bucket check` reads.
  inspect_actions = [
    "s3:GetBucketOwnershipControls",
    "s3:GetBucketPolicy",
    "s3:GetBucketPublicAccessBlock",
    "s3:GetBucketTagging",
    "s3:GetBucketVersioning",
    "s3:GetEncryptionConfiguration",
    "s3:GetLifecycleConfiguration",
  ]

  role_grants = {
    node = {
      description  = "s3kv engine node: reads and writes the cache"
      object       = concat(local.read_actions, local.write_actions)
      bucket       = []
      kms          = ["kms:Decrypt", "kms:GenerateDataKey"]
      session_mode = "ReadWrite"
    }
    collector = {
      description  = "s3kv collector: reads, writes and deletes"
      object       = concat(local.read_actions, local.write_actions, ["s3:DeleteObject"])
      bucket       = concat(["s3:ListBucketMultipartUploads"], local.inspect_actions)
      kms          = ["kms:Decrypt", "kms:GenerateDataKey"]
      session_mode = "ReadWrite"
    }
    reader = {
      description  = "s3kv reader: warms and inspects"
      object       = local.read_actions
      bucket       = local.inspect_actions
      kms          = ["kms:Decrypt"]
      session_mode = "ReadOnly"
    }
  }
}

data "aws_iam_policy_document" "role" {
  for_each = local.role_grants

  # Not narrowed by s3:prefix: a GET of a key that is not there carries no prefix, and S3 answers 404 only to those who
  # may list, 403 to others. A missing object has to look like a miss, not like broken credentials.
  statement {
    sid       = "Bucket"
    actions   = concat(["s3:GetBucketLocation", "s3:ListBucket"], each.value.bucket)
    resources = [local.bucket_arn]
  }

  statement {
    sid       = "Objects"
    actions   = each.value.object
    resources = ["${local.bucket_arn}/${local.key_prefix}*"]
  }

  dynamic "statement" {
    for_each = var.encryption.create_kms_key || var.encryption.kms_key_arn != null ? [local.kms_key_arn] : []

    content {
      sid       = "Key"
      actions   = each.value.kms
      resources = [statement.value]

      condition {
        test     = "StringEquals"
        variable = "kms:ViaService"
        values   = [data.aws_service.s3.dns_name]
      }
    }
  }

  dynamic "statement" {
    for_each = local.express_arn[*]

    content {
      sid       = "Express"
      actions   = ["s3express:CreateSession"]
      resources = [statement.value]

      # A session is ReadWrite unless it asks for less. Sessions know no single actions: on a directory bucket a node may delete, too.
      dynamic "condition" {
        for_each = each.value.session_mode == "ReadOnly" ? ["ReadOnly"] : []

        content {
          test     = "StringEquals"
          variable = "s3express:SessionMode"
          values   = [condition.value]
        }
      }
    }
  }
}

resource "aws_iam_policy" "this" {
  for_each = var.create_policies ? local.role_grants : {}

  name        = "${local.iam_name_prefix}-${each.key}"
  path        = var.iam_path
  description = "${each.value.description} (${var.bucket_name})"
  policy      = data.aws_iam_policy_document.role[each.key].json
  tags        = local.tags
}

data "aws_iam_policy_document" "trust" {
  for_each = var.roles

  dynamic "statement" {
    for_each = each.value.irsa[*]

    content {
      sid     = "Irsa"
      actions = ["sts:AssumeRoleWithWebIdentity"]

      principals {
        type        = "Federated"
        identifiers = [statement.value.oidc_provider_arn]
      }

      condition {
        test     = "StringEquals"
        variable = "${split(":oidc-provider/", statement.value.oidc_provider_arn)[1]}:aud"
        values   = ["sts.amazonaws.com"]
      }

      condition {
        test     = "StringEquals"
        variable = "${split(":oidc-provider/", statement.value.oidc_provider_arn)[1]}:sub"
        values   = [for account in statement.value.service_accounts : "system:serviceaccount:${account}"]
      }
    }
  }

  dynamic "statement" {
    for_each = each.value.pod_identity[*]

    content {
      sid     = "PodIdentity"
      actions = ["sts:AssumeRole", "sts:TagSession"]

      principals {
        type        = "Service"
        identifiers = ["pods.eks.amazonaws.com"]
      }
    }
  }

  dynamic "statement" {
    for_each = each.value.ec2 ? ["ec2.${local.dns_suffix}"] : []

    content {
      sid     = "Ec2"
      actions = ["sts:AssumeRole"]

      principals {
        type        = "Service"
        identifiers = [statement.value]
      }
    }
  }
}

resource "aws_iam_role" "this" {
  for_each = var.roles

  name                 = "${local.iam_name_prefix}-${each.key}"
  path                 = var.iam_path
  description          = local.role_grants[each.key].description
  assume_role_policy   = data.aws_iam_policy_document.trust[each.key].json
  permissions_boundary = each.value.permissions_boundary
  tags                 = local.tags
}

resource "aws_iam_role_policy_attachment" "this" {
  for_each = var.roles

  role       = aws_iam_role.this[each.key].name
  policy_arn = aws_iam_policy.this[each.key].arn
}

resource "aws_iam_instance_profile" "this" {
  for_each = { for name, role in var.roles : name => role if role.ec2 }

  name = aws_iam_role.this[each.key].name
  path = var.iam_path
  role = aws_iam_role.this[each.key].name
  tags = local.tags
}

resource "aws_eks_pod_identity_association" "this" {
  for_each = merge([
    for name, role in var.roles : {
      for account in try(role.pod_identity.service_accounts, []) :
      "${name}/${account}" => { role = name, cluster = role.pod_identity.cluster_name, account = split(":", account) }
    }
  ]...)

  cluster_name    = each.value.cluster
  namespace       = each.value.account[0]
  service_account = each.value.account[1]
  role_arn        = aws_iam_role.this[each.value.role].arn
  tags            = local.tags
}
