"""Models that the C library runs, with their batches, heads and answers as arrays, without torch."""
