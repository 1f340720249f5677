"""One file per dialect, or per task where dialects share a path: the bodies and their routes."""
