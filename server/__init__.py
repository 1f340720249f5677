"""HTTP in, HTTP out: the command line, the routes and their schemas. Knows no torch."""
