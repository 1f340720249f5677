"""One router per dialect."""
