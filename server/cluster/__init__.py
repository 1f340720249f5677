"""Beyond one machine, on Ray: replicas of the application behind Ray Serve, and files of texts through Ray Data."""
