"""Jobs that embed files in shards and continue after an interruption: `penstock embed` and `penstock ray embed`."""
