// cohere-ai (npm), both versions of its API, against /v1 and /v2.

import assert from "node:assert/strict";
import { test } from "node:test";

import { CohereClient, CohereClientV2, CohereError } from "cohere-ai";

import {
  DOCUMENTS,
  KEY,
  MODEL,
  PROTECTED_URL,
  QUERY,
  RERANKER,
  RERANKER_URL,
  TEXTS,
  TOO_LONG,
  URL,
  assertClose,
  embed,
  post,
  rerank,
} from "./plain_http.mjs";

const v1 = new CohereClient({ token: "any", environment: URL });
const v2 = new CohereClientV2({ token: "any", environment: URL });
const ranks = (answer) => answer.results.map((row) => [row.index, row.relevanceScore]);

test("v1 embed", async () => {
  const answer = await v1.embed({ texts: TEXTS, model: MODEL, inputType: "search_document" });
  assert.equal(answer.responseType, "embeddings_floats");
  assertClose(answer.embeddings, await embed(TEXTS));
});

test("v1 embed by type", async () => {
  const request = { texts: TEXTS, model: MODEL, inputType: "search_document", embeddingTypes: ["float", "int8"] };
  const { embeddings } = await v1.embed(request);
  assertClose(embeddings.float, await embed(TEXTS));
  assert.deepEqual(embeddings.int8, await embed(TEXTS, { encoding_format: "int8" }));
});

test("v2 embed", async () => {
  const request = { texts: TEXTS, model: MODEL, inputType: "search_query", embeddingTypes: ["float", "ubinary"] };
  const { embeddings, meta } = await v2.embed(request);
  assertClose(embeddings.float, await embed(TEXTS));
  assert.deepEqual(embeddings.ubinary, await embed(TEXTS, { encoding_format: "ubinary" }));
  assert.equal(meta.apiVersion.version, "2");
});

test("v1 rerank", async () => {
  const client = new CohereClient({ token: "any", environment: RERANKER_URL });
  const request = { model: RERANKER, query: QUERY, documents: DOCUMENTS, returnDocuments: true };
  const answer = await client.rerank(request);
  assertClose(ranks(answer), await rerank());
  assert.deepEqual(answer.results.map((row) => row.document.text), answer.results.map((row) => DOCUMENTS[row.index]));
});

test("v2 rerank", async () => {
  const client = new CohereClientV2({ token: "any", environment: RERANKER_URL });
  const request = { model: RERANKER, query: QUERY, documents: DOCUMENTS };
  assertClose(ranks(await client.rerank(request)), await rerank());
  assertClose(ranks(await client.rerank({ ...request, topN: 2 })), (await rerank()).slice(0, 2));
});

test("classify by examples", async () => {
  const examples = [
    { text: "Where is my parcel?", label: "shipping" },
    { text: "When does it arrive?", label: "shipping" },
    { text: "I want my money back.", label: "refund" },
    { text: "Please return the payment.", label: "refund" },
  ];
  const inputs = ["The delivery is late.", "Give me a refund."];
  const answer = await v1.classify({ model: MODEL, inputs, examples });
  const expected = (await post("/v1/classify", { inputs, examples })).classifications;
  assert.deepEqual(answer.classifications.map((row) => row.prediction), ["shipping", "refund"]);
  assertClose(answer.classifications.map((row) => row.confidence), expected.map((row) => row.confidence));
});

test("tokenize and detokenize", async () => {
  const answer = await v1.tokenize({ text: "penstocks hold water", model: MODEL });
  assert.deepEqual(answer.tokenStrings, ["pens", "##tock", "##s", "hold", "water"]);
  assert.equal((await v1.detokenize({ tokens: answer.tokens, model: MODEL })).text, "penstocks hold water");
});

test("errors", async () => {
  const request = { texts: TEXTS, model: "unknown", inputType: "search_query", embeddingTypes: ["float"] };
  await assert.rejects(v2.embed(request), (error) => {
    assert.ok(error instanceof CohereError);
    assert.equal(error.constructor.name, "NotFoundError");
    return error.statusCode === 404 && error.body.message.includes("'unknown'");
  });
  await assert.rejects(v2.embed({ ...request, model: MODEL, texts: [TOO_LONG], truncate: "NONE" }), (error) => {
    assert.equal(error.constructor.name, "BadRequestError");
    return error.body.message.includes("maximum context length is 256 tokens");
  });
});

test("api key", async () => {
  const request = { model: MODEL, query: QUERY, documents: DOCUMENTS };
  const wrong = new CohereClientV2({ token: "wrong", environment: PROTECTED_URL });
  await assert.rejects(wrong.rerank(request), (error) => error.constructor.name === "UnauthorizedError");
  const right = new CohereClientV2({ token: KEY, environment: PROTECTED_URL });
  assertClose(ranks(await right.rerank(request)), await rerank(DOCUMENTS, URL));
});
