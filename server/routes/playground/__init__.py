"""The page for trying a server in a browser."""
