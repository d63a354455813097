# The smallest use: one bucket, and the settings file for s3kv.
terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.80, < 7.0"
    }
  }
}

provider "aws" {
  region = var.region
}

variable "region" {
  description = "Region of the GPU nodes: reads from another region are slow and charged."
  type        = string
  default     = "us-east-1"
}

variable "bucket_name" {
  description = "Name of the bucket."
  type        = string
}

module "s3kv" {
  source = "../.."

  bucket_name = var.bucket_name
}

output "settings_yaml" {
  description = "terraform output -raw settings_yaml > s3kv.yaml"
  value       = module.s3kv.settings_yaml
}
