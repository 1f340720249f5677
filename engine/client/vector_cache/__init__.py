"""Cache of computed vectors in memory and on disk."""
