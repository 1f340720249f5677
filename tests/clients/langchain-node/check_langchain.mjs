// @langchain/openai and @langchain/cohere (npm).

import assert from "node:assert/strict";
import { test } from "node:test";

import { CohereRerank } from "@langchain/cohere";
import { OpenAIEmbeddings } from "@langchain/openai";
import { CohereClient } from "cohere-ai";

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
  assertClose,
  embed,
  rerank,
} from "./plain_http.mjs";

const openai = (apiKey = "any", url = URL, model = MODEL) => {
  return new OpenAIEmbeddings({ model, apiKey, configuration: { baseURL: `${url}/v1` } });
};

test("embeddings of texts", async () => {
  assertClose(await openai().embedDocuments(TEXTS), await embed(TEXTS));
  assertClose(await openai().embedQuery(QUERY), (await embed([QUERY]))[0]);
});

test("2048 texts", async () => {
  assertClose(await openai().embedDocuments(MANY), await embed(MANY)); // batches of 512 at once
});

test("cohere rerank", async () => {
  const client = new CohereClient({ token: "any", environment: RERANKER_URL });
  const reranker = new CohereRerank({ client, model: RERANKER, topN: 4 });
  const found = await reranker.rerank(DOCUMENTS, QUERY, { topN: 4 });
  assertClose(found.map((row) => [row.index, row.relevanceScore]), await rerank());
});

test("errors", async () => {
  await assert.rejects(openai("any", URL, "unknown").embedQuery(QUERY), /'unknown'/);
});

test("api key", async () => {
  await assert.rejects(openai("wrong", PROTECTED_URL).embedQuery(QUERY), /key/);
  assertClose(await openai(KEY, PROTECTED_URL).embedQuery(QUERY), (await embed([QUERY]))[0]);
});
