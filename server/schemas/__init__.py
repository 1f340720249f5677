"""Request and response models, one file per dialect."""
