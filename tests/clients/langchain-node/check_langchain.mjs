// @langchain/openai and @langchain/cohere (npm).

import assert from "node:assert/strict";
import { test } from "node:test";

import { CohereRerank } from "@langchain/cohere";
import { OpenAIEmbeddings } from "@langchain/openai";
import { CohereClient } from "cohere-ai";

import * as http from "./plain_http.mjs";
import { DOCUMENTS, MANY, MODEL, QUERY, URL, assertClose } from "./plain_http.mjs";

const openai = ({ apiKey = "any", url = URL, model = MODEL } = {}) => {
  return new OpenAIEmbeddings({ model, apiKey, configuration: { baseURL: `${url}/v1` } });
};

test("embeddings equal plain HTTP", async () => {
  assertClose(await openai().embedDocuments(MANY), await http.embed(MANY)); // batches of 512
  assertClose(await openai().embedQuery(QUERY), (await http.embed([QUERY]))[0]);
});

test("ranks equal plain HTTP", async () => {
  const client = new CohereClient({ token: "any", environment: http.RERANKER_URL });
  const found = await new CohereRerank({ client, model: http.RERANKER }).rerank(DOCUMENTS, QUERY, { topN: 4 });
  assertClose(found.map((row) => [row.index, row.relevanceScore]), await http.rerank());
});

test("errors have the message", async () => {
  await assert.rejects(openai({ model: "unknown" }).embedQuery(QUERY), /'unknown'/);
  await assert.rejects(openai({ apiKey: "wrong", url: http.PROTECTED_URL }).embedQuery(QUERY), /key/);
});
