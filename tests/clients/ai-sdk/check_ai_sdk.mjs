// The AI SDK (npm) with its providers @ai-sdk/openai-compatible and @ai-sdk/cohere.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createCohere } from "@ai-sdk/cohere";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed as embedOne, embedMany, rerank as rerankDocuments } from "ai";

import {
  DOCUMENTS,
  KEY,
  MANY,
  MODEL,
  PROTECTED_URL,
  QUERY,
  RERANKER,
  RERANKER_URL,
  TEXTS,
  URL,
  WIDTH,
  assertClose,
  embed,
  rerank,
} from "./plain_http.mjs";

const compatible = createOpenAICompatible({ name: "penstock", baseURL: `${URL}/v1`, apiKey: "any" });
const cohere = createCohere({ baseURL: `${URL}/v2`, apiKey: "any" });

test("embed and embedMany", async () => {
  const model = compatible.textEmbeddingModel(MODEL);
  assertClose((await embedOne({ model, value: TEXTS[0] })).embedding, (await embed(TEXTS))[0]);
  const answer = await embedMany({ model, values: TEXTS });
  assertClose(answer.embeddings, await embed(TEXTS));
  assert.ok(answer.usage.tokens > 0);
});

test("2048 texts", async () => {
  const answer = await embedMany({ model: compatible.textEmbeddingModel(MODEL), values: MANY });
  assertClose(answer.embeddings, await embed(MANY));
});

test("dimensions", async () => {
  const model = compatible.textEmbeddingModel(MODEL);
  const providerOptions = { openaiCompatible: { dimensions: WIDTH } };
  assertClose((await embedMany({ model, values: TEXTS, providerOptions })).embeddings, await embed(TEXTS));
});

test("embed of Cohere's provider", async () => {
  const answer = await embedMany({ model: cohere.textEmbeddingModel(MODEL), values: MANY.slice(0, 200) });
  assertClose(answer.embeddings, await embed(MANY.slice(0, 200)));
});

test("rerank of Cohere's provider", async () => {
  const provider = createCohere({ baseURL: `${RERANKER_URL}/v2`, apiKey: "any" });
  const model = provider.reranking(RERANKER);
  const { ranking } = await rerankDocuments({ model, query: QUERY, documents: DOCUMENTS });
  assertClose(ranking.map((row) => [row.originalIndex, row.score]), await rerank());
  const two = await rerankDocuments({ model, query: QUERY, documents: DOCUMENTS, topN: 2 });
  assertClose(two.ranking.map((row) => [row.originalIndex, row.score]), (await rerank()).slice(0, 2));
});

test("errors", async () => {
  for (const provider of [compatible, cohere]) {
    const model = provider.textEmbeddingModel("unknown");
    await assert.rejects(embedOne({ model, value: "a", maxRetries: 0 }), (error) => {
      assert.ok(APICallError.isInstance(error));
      return error.statusCode === 404 && error.message.includes("'unknown'");
    });
  }
});

test("api key", async () => {
  const options = { name: "penstock", baseURL: `${PROTECTED_URL}/v1` };
  const wrong = createOpenAICompatible({ ...options, apiKey: "wrong" }).textEmbeddingModel(MODEL);
  await assert.rejects(embedOne({ model: wrong, value: "a" }), (error) => error.statusCode === 401);
  const right = createOpenAICompatible({ ...options, apiKey: KEY }).textEmbeddingModel(MODEL);
  assertClose((await embedOne({ model: right, value: "a" })).embedding, (await embed(["a"]))[0]);
});
