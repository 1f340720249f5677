"""Jobs that embed files in shards and go on after an interruption: `penstock embed` and `penstock ray embed`."""
