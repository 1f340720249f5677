"""The served models: names, state, loading and unloading."""
