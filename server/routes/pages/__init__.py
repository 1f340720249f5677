"""Pages for a browser: one for trying a server, and the document of its routes."""
