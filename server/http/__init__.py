"""HTTP connections, heads of requests, JSON bodies and responses, and encodings of vectors."""
