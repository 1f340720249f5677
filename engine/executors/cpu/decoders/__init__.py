"""Decoders for the native kernels: what config.json says of each family, and their checkpoints. Without torch."""
