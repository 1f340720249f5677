"""LangChain: a vector store with penstock's embeddings."""

import sys
from pathlib import Path

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
PASSAGES = (Path(__file__).parent / "data" / "passages.txt").read_text().splitlines()

embeddings = OpenAIEmbeddings(
    model="all-MiniLM-L6-v2",
    base_url=f"{URL}/v1",
    api_key="none",
    check_embedding_ctx_length=False,  # otherwise LangChain sends ids of OpenAI's tokenizer
)
store = InMemoryVectorStore.from_texts(PASSAGES, embeddings)
found = store.similarity_search_with_score("Where are wind farms built?", k=3)
for document, score in found:
    print(f"{score:.3f}  {document.page_content}")

assert "Wind turbines" in found[0][0].page_content
