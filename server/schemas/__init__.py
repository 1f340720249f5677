"""Request and response models, one file per dialect, or per task where dialects share a path."""
