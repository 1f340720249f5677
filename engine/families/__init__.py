"""Model families. Each converts config.json to a ModelSpec, which the executors run. Does not import torch."""
