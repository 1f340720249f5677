"""The command line: `penstock serve`, `embed`, `info` and `models`."""
