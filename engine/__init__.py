"""Text or token ids in, numpy arrays out. Knows no HTTP."""
