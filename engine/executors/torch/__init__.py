"""The executor for torch: packed tokens run through penstock's layers and kernels, other families on transformers."""
