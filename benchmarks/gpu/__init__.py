"""What a CUDA device makes of penstock: `make bench-gpu` runs all of it and writes one result."""
