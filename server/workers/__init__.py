"""Workers: HTTP processes that share one port. A supervisor process owns the engines and passes connections to them."""
