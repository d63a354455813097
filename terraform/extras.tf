resource "aws_vpc_endpoint" "this" {
  count = var.gateway_endpoint == null ? 0 : 1

  vpc_id            = var.gateway_endpoint.vpc_id
  vpc_endpoint_type = "Gateway"
  service_name      = "com.amazonaws.${local.region}.s3"
  route_table_ids   = var.gateway_endpoint.route_table_ids
  policy            = var.gateway_endpoint.policy
  tags              = merge(local.tags, { Name = "${var.bucket_name}-s3" })
}

resource "aws_s3_bucket_metric" "this" {
  count = var.request_metrics ? 1 : 0

  bucket = aws_s3_bucket.this.id
  name   = "s3kv"

  dynamic "filter" {
    for_each = var.prefix == "" ? [] : [local.key_prefix]

    content {
      prefix = filter.value
    }
  }
}

locals {
  # CloudWatch has a size for each storage class; the alarm watches the sum over those that s3kv can put objects in.
  size_alarm_storage_types = {
    standard      = "StandardStorage"
    standard_ia   = "StandardIAStorage"
    onezone_ia    = "OneZoneIAStorage"
    glacier_ir    = "GlacierInstantRetrievalStorage"
    it_frequent   = "IntelligentTieringFAStorage"
    it_infrequent = "IntelligentTieringIAStorage"
    it_instant    = "IntelligentTieringAIAStorage"
  }
}

resource "aws_cloudwatch_metric_alarm" "size" {
  count = var.size_alarm == null ? 0 : 1

  alarm_name          = "${var.bucket_name}-size"
  alarm_description   = "The s3kv bucket holds more than its budget: run s3kv gc, shorten the expiry, or raise the budget."
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.size_alarm.threshold_bytes
  evaluation_periods  = 1
  treat_missing_data  = "notBreaching" # an empty bucket reports no size
  alarm_actions       = var.size_alarm.alarm_actions
  ok_actions          = var.size_alarm.alarm_actions
  tags                = local.tags

  metric_query {
    id          = "total"
    label       = "Bytes in all storage classes"
    expression  = "SUM([${join(", ", [for id in sort(keys(local.size_alarm_storage_types)) : "FILL(${id}, 0)"])}])"
    return_data = true
  }

  dynamic "metric_query" {
    for_each = local.size_alarm_storage_types

    content {
      id = metric_query.key

      metric {
        namespace   = "AWS/S3"
        metric_name = "BucketSizeBytes"
        period      = 86400
        stat        = "Average"
        dimensions = {
          BucketName  = var.bucket_name
          StorageType = metric_query.value
        }
      }
    }
  }
}
