variable "bucket_name" {
  description = "Name of the bucket. ARNs and policies are built from it, so it must be known at plan time."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name must be 3 to 63 lowercase letters, digits or hyphens, without dots (they break TLS host names)."
  }
  validation {
    condition     = !startswith(var.bucket_name, "xn--") && !startswith(var.bucket_name, "sthree-") && !can(regex("(-s3alias|--ol-s3|--x-s3|--table-s3)$", var.bucket_name))
    error_message = "bucket_name uses a prefix or suffix that S3 reserves."
  }
}

variable "prefix" {
  description = "Key prefix of everything that s3kv stores, without slashes at the ends. \"\" is the bucket's root."
  type        = string
  default     = "s3kv"
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*)?$", var.prefix)) && length(var.prefix) <= 200
    error_message = "prefix may hold letters, digits, '.', '_', '-' and single inner slashes, at most 200 characters."
  }
}

variable "force_destroy" {
  description = "Whether `terraform destroy` may delete a bucket that still holds objects. The content can be computed again, but not for free."
  type        = bool
  default     = false
  nullable    = false
}

variable "tags" {
  description = "Tags for every resource that takes tags; merged over the module's own `Application` tag."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "encryption" {
  description = "Default encryption. `algorithm`: `AES256` (SSE-S3) or `aws:kms`; with `aws:kms` either `kms_key_arn`, or `create_kms_key` for a key of the bucket's own, or neither for the AWS managed key. `bucket_key` saves nearly all KMS calls."
  type = object({
    algorithm      = optional(string, "AES256")
    kms_key_arn    = optional(string)
    create_kms_key = optional(bool, false)
    bucket_key     = optional(bool, true)
  })
  default  = {}
  nullable = false

  validation {
    condition     = contains(["AES256", "aws:kms"], var.encryption.algorithm)
    error_message = "encryption.algorithm must be \"AES256\" or \"aws:kms\"."
  }
  validation {
    condition     = var.encryption.algorithm == "aws:kms" || (var.encryption.kms_key_arn == null && !var.encryption.create_kms_key)
    error_message = "encryption.kms_key_arn and encryption.create_kms_key need encryption.algorithm = \"aws:kms\"."
  }
  validation {
    condition     = !(var.encryption.create_kms_key && var.encryption.kms_key_arn != null)
    error_message = "Give encryption.kms_key_arn or set encryption.create_kms_key, not both."
  }
  validation {
    condition     = var.encryption.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/", var.encryption.kms_key_arn))
    error_message = "encryption.kms_key_arn must be the ARN of a key (an alias cannot be named in a policy)."
  }
}

variable "expiry_days" {
  description = "Backstop: days after which anything under `ns/` (chunks, log segments, snapshots) is deleted, counted from when it was written, used or not. `s3kv gc` is what keeps the cache to size and age."
  type        = number
  default     = 90
  nullable    = false

  validation {
    condition     = var.expiry_days >= 2 && floor(var.expiry_days) == var.expiry_days
    error_message = "expiry_days must be a whole number, 2 or more."
  }
}

variable "lease_expiry_days" {
  description = "Backstop: days after which a lease object that nobody renews is deleted."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = var.lease_expiry_days >= 1 && floor(var.lease_expiry_days) == var.lease_expiry_days
    error_message = "lease_expiry_days must be a whole number, 1 or more."
  }
}

variable "abort_multipart_days" {
  description = "Days after which the parts of an incomplete multipart upload are deleted."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.abort_multipart_days >= 1 && floor(var.abort_multipart_days) == var.abort_multipart_days
    error_message = "abort_multipart_days must be a whole number, 1 or more."
  }
}

variable "transition" {
  description = "Moves objects under `ns/` (S3 leaves out those below 128 KiB) to another storage class after `days`: `INTELLIGENT_TIERING` (from day 0), `STANDARD_IA` or `ONEZONE_IA` (from day 30), `GLACIER_IR` (from day 0). Null keeps everything in S3 Standard."
  type = object({
    storage_class = string
    days          = optional(number, 30)
  })
  default = null

  validation {
    condition     = var.transition == null ? true : contains(["INTELLIGENT_TIERING", "STANDARD_IA", "ONEZONE_IA", "GLACIER_IR"], var.transition.storage_class)
    error_message = "transition.storage_class must be INTELLIGENT_TIERING, STANDARD_IA, ONEZONE_IA or GLACIER_IR: from the others an object cannot be read at once, which to a cache is a miss."
  }
  validation {
    condition     = var.transition == null ? true : var.transition.days >= (endswith(var.transition.storage_class, "_IA") ? 30 : 0) && floor(var.transition.days) == var.transition.days
    error_message = "transition.days must be a whole number, 30 or more for STANDARD_IA and ONEZONE_IA."
  }
  validation {
    condition     = var.transition == null ? true : var.transition.days < var.expiry_days
    error_message = "transition.days must be less than expiry_days."
  }
}

variable "bucket_policy_documents" {
  description = "Further policy documents (JSON) merged into the bucket policy, for example to let another account's role in."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "create_policies" {
  description = "Whether to create the three managed policies. The documents are always in the output `policy_documents`."
  type        = bool
  default     = true
  nullable    = false
}

variable "iam_name_prefix" {
  description = "Start of the names of policies and roles; null takes the bucket's name, cut to 54 characters."
  type        = string
  default     = null

  validation {
    condition     = var.iam_name_prefix == null ? true : can(regex("^[A-Za-z0-9+=,.@_-]{1,54}$", var.iam_name_prefix))
    error_message = "iam_name_prefix must be 1 to 54 characters that IAM takes in names."
  }
}

variable "iam_path" {
  description = "IAM path of policies, roles and instance profiles."
  type        = string
  default     = "/"
  nullable    = false

  validation {
    condition     = can(regex("^/([!-~]+/)?$", var.iam_path))
    error_message = "iam_path must begin and end with a slash."
  }
}

variable "roles" {
  description = "Roles to create, by `node` (engine node: read and write), `collector` (also delete) or `reader` (warm and inspect). Each is trusted by any of: `irsa` (EKS service accounts through the cluster's OIDC provider), `pod_identity` (EKS Pod Identity, associations included), `ec2` (with an instance profile). Service accounts are written `namespace:name`."
  type = map(object({
    irsa = optional(object({
      oidc_provider_arn = string
      service_accounts  = list(string)
    }))
    pod_identity = optional(object({
      cluster_name     = string
      service_accounts = list(string)
    }))
    ec2                  = optional(bool, false)
    permissions_boundary = optional(string)
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for name in keys(var.roles) : contains(["node", "collector", "reader"], name)])
    error_message = "roles may have the keys node, collector and reader."
  }
  validation {
    condition     = length(var.roles) == 0 || var.create_policies
    error_message = "roles need create_policies = true."
  }
  validation {
    condition     = alltrue([for role in values(var.roles) : role.ec2 || role.irsa != null || role.pod_identity != null])
    error_message = "Each of roles needs at least one of irsa, pod_identity and ec2: a role that nobody may assume is of no use."
  }
  validation {
    condition = alltrue(flatten([for role in values(var.roles) : [
      for account in concat(try(role.irsa.service_accounts, []), try(role.pod_identity.service_accounts, [])) :
      can(regex("^[a-z0-9]([a-z0-9-]*[a-z0-9])?:[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", account))
    ]]))
    error_message = "Service accounts in roles are written namespace:name, without wildcards."
  }
  validation {
    condition     = alltrue([for role in values(var.roles) : role.irsa == null ? true : length(role.irsa.service_accounts) > 0 && can(regex(":oidc-provider/.+", role.irsa.oidc_provider_arn))])
    error_message = "roles.*.irsa needs the ARN of an OIDC provider and at least one service account."
  }
}

variable "gateway_endpoint" {
  description = "Creates an S3 gateway endpoint in the VPC, so that traffic to the bucket is neither charged by a NAT gateway nor leaves the network. `policy` is JSON; null allows all of S3, as the VPC's other users need."
  type = object({
    vpc_id          = string
    route_table_ids = list(string)
    policy          = optional(string)
  })
  default = null

  validation {
    condition     = var.gateway_endpoint == null ? true : length(var.gateway_endpoint.route_table_ids) > 0
    error_message = "gateway_endpoint.route_table_ids must name at least one route table: an endpoint without routes carries nothing."
  }
}

variable "express" {
  description = "Creates an S3 Express One Zone directory bucket beside the bucket, named `<bucket_name>--<zone_id>--x-s3`, in the availability zone with this ID (for example `use1-az4`)."
  type = object({
    zone_id = string
  })
  default = null

  validation {
    condition     = var.express == null ? true : can(regex("^[a-z]{3,4}[0-9]+-az[0-9]+$", var.express.zone_id))
    error_message = "express.zone_id must be the ID of an availability zone, like use1-az4 (not its name, like us-east-1a)."
  }
  validation {
    condition     = var.express == null ? true : length(var.bucket_name) + length(var.express.zone_id) + length("----x-s3") <= 63
    error_message = "bucket_name is too long for the directory bucket's name, which adds the zone's ID and may have 63 characters in all."
  }
}

variable "request_metrics" {
  description = "Whether to turn on S3 request metrics (charged by CloudWatch) for the prefix: requests, errors, first-byte latency."
  type        = bool
  default     = false
  nullable    = false
}

variable "size_alarm" {
  description = "A budget alarm: goes off when the bucket holds more than `threshold_bytes`, over all storage classes that s3kv can use (S3 reports sizes once a day). `alarm_actions`: ARNs, such as an SNS topic."
  type = object({
    threshold_bytes = number
    alarm_actions   = optional(list(string), [])
  })
  default = null

  validation {
    condition     = var.size_alarm == null ? true : var.size_alarm.threshold_bytes > 0
    error_message = "size_alarm.threshold_bytes must be more than 0."
  }
}
