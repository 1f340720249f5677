"""Haystack: a pipeline of an embedder and a retriever."""

import sys
from pathlib import Path

from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
PASSAGES = (Path(__file__).parent / "data" / "passages.txt").read_text().splitlines()
SERVER = {"api_key": Secret.from_token("none"), "model": "all-MiniLM-L6-v2", "api_base_url": f"{URL}/v1"}

store = InMemoryDocumentStore(embedding_similarity_function="cosine")
embedder = OpenAIDocumentEmbedder(**SERVER, progress_bar=False)
store.write_documents(embedder.run([Document(content=text) for text in PASSAGES])["documents"])

pipeline = Pipeline()
pipeline.add_component("embedder", OpenAITextEmbedder(**SERVER))
pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3))
pipeline.connect("embedder.embedding", "retriever.query_embedding")
found = pipeline.run({"embedder": {"text": "How do people make cheese?"}})["retriever"]["documents"]
for document in found:
    print(f"{document.score:.3f}  {document.content}")

assert "Cheese" in found[0].content
