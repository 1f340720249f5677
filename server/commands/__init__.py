"""The command line: `penstock serve`, `embed` and `info`."""
