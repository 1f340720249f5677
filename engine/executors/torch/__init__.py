"""Run models on torch: packed tokens through our own layers and kernels, other families through transformers."""
