"""Executors of ModelSpecs: on the CPU with the C library, and with torch."""
