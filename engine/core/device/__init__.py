"""The device that a model runs on: its selection and errors, its memory, and the events of its stream."""
