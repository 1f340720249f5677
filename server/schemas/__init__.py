"""Fields of request and response bodies that several dialects share, and the bodies of batches and of TEI."""
