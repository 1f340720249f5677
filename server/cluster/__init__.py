"""Several machines with Ray: replicas of the server with Ray Serve, and embedding of files with Ray Data."""
