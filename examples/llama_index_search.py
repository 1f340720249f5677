"""LlamaIndex: an index with penstock's embeddings."""

import sys
from pathlib import Path

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
PASSAGES = (Path(__file__).parent / "data" / "passages.txt").read_text().splitlines()

embedding = OpenAILikeEmbedding(model_name="all-MiniLM-L6-v2", api_base=f"{URL}/v1", api_key="none")
index = VectorStoreIndex.from_documents([Document(text=text) for text in PASSAGES], embed_model=embedding)
found = index.as_retriever(similarity_top_k=3).retrieve("How long is a marathon?")
for node in found:
    print(f"{node.score:.3f}  {node.text}")

assert "42.195" in found[0].text
