output "bucket_name" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.bucket
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = local.bucket_arn
}

output "region" {
  description = "Region of the bucket."
  value       = local.region
}

output "store_url" {
  description = "The setting `store.url` of s3kv."
  value       = local.settings.store.url
}

output "settings_yaml" {
  description = "A ready settings file for s3kv: save it where `S3KV_CONFIG` points."
  value       = yamlencode(local.settings)
}

output "express_settings_yaml" {
  description = "A ready settings file for s3kv on the directory bucket; null without `express`."
  value       = var.express == null ? null : yamlencode(local.express_settings)
}

output "policy_documents" {
  description = "The three least-privilege policies as JSON, by `node`, `collector` and `reader`."
  value       = { for name, document in data.aws_iam_policy_document.role : name => document.json }
}

output "policy_arns" {
  description = "ARNs of the managed policies, by `node`, `collector` and `reader`; empty without `create_policies`."
  value       = { for name, policy in aws_iam_policy.this : name => policy.arn }
}

output "role_arns" {
  description = "ARNs of the created roles, by name in `roles`."
  value       = { for name, role in aws_iam_role.this : name => role.arn }
}

output "instance_profile_names" {
  description = "Names of the instance profiles, by name in `roles`."
  value       = { for name, profile in aws_iam_instance_profile.this : name => profile.name }
}

output "kms_key_arn" {
  description = "ARN of the KMS key that encrypts the bucket; null with SSE-S3 and with the AWS managed key."
  value       = local.kms_key_arn
}

output "gateway_endpoint_id" {
  description = "ID of the S3 gateway endpoint; null without `gateway_endpoint`."
  value       = one(aws_vpc_endpoint.this[*].id)
}

output "express_bucket_name" {
  description = "Name of the directory bucket; null without `express`."
  value       = one(aws_s3_directory_bucket.this[*].bucket)
}

output "size_alarm_arn" {
  description = "ARN of the alarm on the bucket's size; null without `size_alarm`."
  value       = one(aws_cloudwatch_metric_alarm.size[*].arn)
}
