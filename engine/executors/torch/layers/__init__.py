"""The layers that the model families share."""
