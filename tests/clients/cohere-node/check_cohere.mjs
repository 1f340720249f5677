// cohere-ai (npm), versions 1 and 2 of its API.

import assert from "node:assert/strict";
import { test } from "node:test";

import { CohereClient, CohereClientV2, CohereError } from "cohere-ai";

import * as http from "./plain_http.mjs";
import { DOCUMENTS, MODEL, QUERY, TEXTS, URL, assertClose } from "./plain_http.mjs";

const v1 = new CohereClient({ token: "any", environment: URL });
const v2 = new CohereClientV2({ token: "any", environment: URL });
const reranking = { model: http.RERANKER, query: QUERY, documents: DOCUMENTS };
const embedding = { model: MODEL, texts: TEXTS, inputType: "search_document" };
const ranks = (answer) => answer.results.map((row) => [row.index, row.relevanceScore]);

test("v1 embeddings equal plain HTTP", async () => {
  const answer = await v1.embed(embedding);
  assert.equal(answer.responseType, "embeddings_floats");
  assertClose(answer.embeddings, await http.embed(TEXTS));
  const { embeddings } = await v1.embed({ ...embedding, embeddingTypes: ["float", "int8"] });
  assertClose(embeddings.float, await http.embed(TEXTS));
  assert.deepEqual(embeddings.int8, await http.embed(TEXTS, { encoding_format: "int8" }));
});

test("v2 embeddings equal plain HTTP", async () => {
  const { embeddings, meta } = await v2.embed({ ...embedding, embeddingTypes: ["float", "ubinary"] });
  assertClose(embeddings.float, await http.embed(TEXTS));
  assert.deepEqual(embeddings.ubinary, await http.embed(TEXTS, { encoding_format: "ubinary" }));
  assert.equal(meta.apiVersion.version, "2");
});

test("ranks equal plain HTTP", async () => {
  const options = { token: "any", environment: http.RERANKER_URL };
  const answer = await new CohereClient(options).rerank({ ...reranking, returnDocuments: true });
  assertClose(ranks(answer), await http.rerank());
  assert.deepEqual(answer.results.map((row) => row.document.text), answer.results.map((row) => DOCUMENTS[row.index]));
  const two = await new CohereClientV2(options).rerank({ ...reranking, topN: 2 });
  assertClose(ranks(two), (await http.rerank()).slice(0, 2));
});

test("classify uses examples", async () => {
  const examples = [
    { text: "Where is my parcel?", label: "shipping" },
    { text: "When does it arrive?", label: "shipping" },
    { text: "I want my money back.", label: "refund" },
    { text: "Please return the payment.", label: "refund" },
  ];
  const inputs = ["The delivery is late.", "Give me a refund."];
  const answer = await v1.classify({ model: MODEL, inputs, examples });
  const expected = (await http.post("/v1/classify", { inputs, examples })).classifications;
  assert.deepEqual(answer.classifications.map((row) => row.prediction), ["shipping", "refund"]);
  assertClose(answer.classifications.map((row) => row.confidence), expected.map((row) => row.confidence));
});

test("tokens are decoded to the text", async () => {
  const answer = await v1.tokenize({ text: "penstocks hold water", model: MODEL });
  assert.deepEqual(answer.tokenStrings, ["pens", "##tock", "##s", "hold", "water"]);
  assert.equal((await v1.detokenize({ tokens: answer.tokens, model: MODEL })).text, "penstocks hold water");
});

test("errors are typed", async () => {
  const wrong = new CohereClientV2({ token: "wrong", environment: http.PROTECTED_URL });
  const request = { ...embedding, embeddingTypes: ["float"] };
  const long = { ...request, texts: [http.TOO_LONG], truncate: "NONE" };
  for (const [call, name, part] of [
    [() => v2.embed({ ...request, model: "unknown" }), "NotFoundError", "'unknown'"],
    [() => v2.embed(long), "BadRequestError", "maximum context length is 256 tokens"],
    [() => wrong.embed(request), "UnauthorizedError", "key"],
  ]) {
    await assert.rejects(call, (error) => {
      assert.ok(error instanceof CohereError);
      assert.equal(error.constructor.name, name);
      return error.body.message.includes(part);
    });
  }
});

test("API key is accepted", async () => {
  const client = new CohereClientV2({ token: http.KEY, environment: http.PROTECTED_URL });
  assertClose(ranks(await client.rerank({ ...reranking, model: MODEL })), await http.rerank(URL));
});
