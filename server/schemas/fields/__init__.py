"""Fields that bodies of several dialects share."""
