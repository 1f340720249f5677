"""Request and response fields that several dialects share, and the bodies of batches and TEI."""
