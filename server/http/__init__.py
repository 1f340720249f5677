"""HTTP connections, request heads, JSON bodies and responses, and encodings of vectors."""
