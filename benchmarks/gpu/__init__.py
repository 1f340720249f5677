"""Measures penstock on a CUDA device: `make bench-gpu` runs all phases and writes one result."""
