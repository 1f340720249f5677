"""Run models: on the CPU as arrays with the C library, and on torch."""
