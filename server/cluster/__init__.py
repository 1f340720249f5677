"""Several machines, with Ray: replicas of the server behind Ray Serve, and files of texts through Ray Data."""
