"""One file per dialect, or per task if dialects share a path: request bodies, response bodies and routes."""
