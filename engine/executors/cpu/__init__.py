"""Models that the native kernels run, with their batches, heads and answers as arrays, without torch."""
