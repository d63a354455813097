# The ready settings files. Names are those of s3kv's own settings; whatever is not here has a working default there.
locals {
  settings = {
    store = {
      url    = join("/", compact(["s3://${aws_s3_bucket.this.bucket}", var.prefix]))
      region = local.region
    }
  }

  express_settings = {
    for name in aws_s3_directory_bucket.this[*].bucket : "store" => {
      url    = join("/", compact(["s3://${name}", var.prefix]))
      region = local.region
    }
  }
}
