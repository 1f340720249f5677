"""One router per dialect, or per task where dialects share a path."""
