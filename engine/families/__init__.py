"""Model families: each turns config.json into a ModelSpec, which the executors run. Without torch."""
