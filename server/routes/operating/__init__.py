"""For whoever runs a server: its health and figures, its models, its settings."""
