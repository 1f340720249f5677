"""The engine process: its loop, the runner of the model, and what is loaded into it."""
