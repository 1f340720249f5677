"""The engine process: its loop, the runners, and the loading of models."""
