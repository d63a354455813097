output "settings_yaml" {
  description = "terraform output -raw settings_yaml > s3kv.yaml"
  value       = module.s3kv.settings_yaml
}

output "express_settings_yaml" {
  description = "The same for the directory bucket."
  value       = module.s3kv.express_settings_yaml
}

output "role_arns" {
  description = "Annotate the node's service account with eks.amazonaws.com/role-arn = role_arns[\"node\"]."
  value       = module.s3kv.role_arns
}
