"""Models that attend to what lies behind: Llama and its relatives."""
