"""The executor for the C library: batches, weights and heads as numpy arrays. Does not import torch."""
