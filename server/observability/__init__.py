"""What is told of requests: metrics, access log, traces."""
