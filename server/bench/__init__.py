"""`penstock bench`: measures servers of embedding, rerank and classification models over HTTP."""
