"""Several HTTP processes on one port: one process supervises them, owns the engines and hands connections out."""
