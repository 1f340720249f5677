"""The served models: their names, which of them are loaded, and when they come and go."""
