// The AI SDK (npm) with its providers @ai-sdk/openai-compatible and @ai-sdk/cohere.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createCohere } from "@ai-sdk/cohere";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, embedMany, rerank } from "ai";

import * as http from "./plain_http.mjs";
import { DOCUMENTS, MANY, MODEL, QUERY, TEXTS, URL, assertClose } from "./plain_http.mjs";

const compatible = (url = URL, apiKey = "any") =>
  createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey });
const cohere = (url = URL, apiKey = "any") => createCohere({ baseURL: `${url}/v2`, apiKey });

test("embeddings equal plain HTTP", async () => {
  const model = compatible().textEmbeddingModel(MODEL);
  assertClose((await embed({ model, value: TEXTS[0] })).embedding, (await http.embed(TEXTS))[0]);
  const providerOptions = { openaiCompatible: { dimensions: http.WIDTH } };
  const answer = await embedMany({ model, values: MANY, providerOptions });
  assertClose(answer.embeddings, await http.embed(MANY));
  assert.ok(answer.usage.tokens > 0);
});

test("embeddings of Cohere's provider equal plain HTTP", async () => {
  const values = MANY.slice(0, 200);
  const answer = await embedMany({ model: cohere().textEmbeddingModel(MODEL), values });
  assertClose(answer.embeddings, await http.embed(values));
});

test("ranks of Cohere's provider equal plain HTTP", async () => {
  const model = cohere(http.RERANKER_URL).reranking(http.RERANKER);
  const ranks = async (options) => {
    const { ranking } = await rerank({ model, query: QUERY, documents: DOCUMENTS, ...options });
    return ranking.map((row) => [row.originalIndex, row.score]);
  };
  assertClose(await ranks({}), await http.rerank());
  assertClose(await ranks({ topN: 2 }), (await http.rerank()).slice(0, 2));
});

test("errors have a status", async () => {
  const wrong = compatible(http.PROTECTED_URL, "wrong");
  for (const [provider, name, status] of [
    [compatible(), "unknown", 404],
    [cohere(), "unknown", 404],
    [wrong, MODEL, 401],
  ]) {
    const model = provider.textEmbeddingModel(name);
    await assert.rejects(embed({ model, value: "a", maxRetries: 0 }), (error) => {
      assert.ok(APICallError.isInstance(error));
      return error.statusCode === status && (status === 401 || error.message.includes("'unknown'"));
    });
  }
});

test("API key is accepted", async () => {
  const model = compatible(http.PROTECTED_URL, http.KEY).textEmbeddingModel(MODEL);
  assertClose((await embed({ model, value: "a" })).embedding, (await http.embed(["a"]))[0]);
});
