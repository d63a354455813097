variable "region" {
  description = "Region of the GPU nodes."
  type        = string
  default     = "us-east-1"
}

variable "bucket_name" {
  description = "Name of the bucket."
  type        = string
}

variable "cluster_name" {
  description = "EKS cluster whose service accounts use the bucket."
  type        = string
}

variable "oidc_provider_arn" {
  description = "ARN of the EKS cluster's OIDC provider in IAM."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the GPU nodes."
  type        = string
}

variable "route_table_ids" {
  description = "Route tables of the GPU nodes' subnets."
  type        = list(string)
}

variable "zone_id" {
  description = "ID of the availability zone of the directory bucket, near the GPUs."
  type        = string
  default     = "use1-az4"
}

variable "alarm_topic_arn" {
  description = "SNS topic that hears of the size alarm."
  type        = string
}
