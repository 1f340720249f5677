"""Results of the engine as bodies of answers."""
