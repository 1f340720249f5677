"""What routes share on the way to the engine: the served models, and how bodies become calls."""
