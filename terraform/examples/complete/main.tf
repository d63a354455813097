# Everything at once: a key of the bucket's own, roles for EKS and EC2, a gateway endpoint, a directory bucket, metrics
# and an alarm.
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

module "s3kv" {
  source = "../.."

  bucket_name   = var.bucket_name
  prefix        = "prod/s3kv"
  force_destroy = true
  tags          = { Team = "inference", CostCenter = "4711" }

  encryption = {
    algorithm      = "aws:kms"
    create_kms_key = true
  }

  expiry_days = 120
  transition  = { storage_class = "INTELLIGENT_TIERING", days = 0 }

  iam_path = "/s3kv/"
  roles = {
    node = {
      irsa = {
        oidc_provider_arn = var.oidc_provider_arn
        service_accounts  = ["inference:trtllm"]
      }
      ec2 = true
    }
    collector = {
      pod_identity = {
        cluster_name     = var.cluster_name
        service_accounts = ["inference:s3kv-gc"]
      }
    }
    reader = { ec2 = true }
  }

  gateway_endpoint = {
    vpc_id          = var.vpc_id
    route_table_ids = var.route_table_ids
  }

  express = { zone_id = var.zone_id }

  request_metrics = true
  size_alarm = {
    threshold_bytes = 50 * pow(1024, 4)
    alarm_actions   = [var.alarm_topic_arn]
  }
}
