"""Several HTTP processes on one port. A supervisor process owns the engines and passes connections to them."""
