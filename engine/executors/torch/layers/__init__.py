"""The layers of the model families."""
