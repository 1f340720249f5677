"""Models with state spaces in place of some or all attention: Mamba and its relatives."""
