// openai (npm) against /v1/embeddings and /v1/models.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI, { AuthenticationError, BadRequestError, NotFoundError, RateLimitError } from "openai";

import { KEY, MANY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, URL, WIDTH, assertClose, embed } from "./plain_http.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "any" });
const vectors = (answer) => answer.data.map((row) => row.embedding);

test("default call", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: TEXTS }); // asks for base64
  assertClose(vectors(answer), await embed(TEXTS));
  assert.equal(answer.model, MODEL);
  assert.ok(answer.usage.total_tokens > TEXTS.length);
});

test("one text", async () => {
  assertClose(vectors(await client.embeddings.create({ model: MODEL, input: TEXTS[0] })), await embed([TEXTS[0]]));
});

test("formats", async () => {
  const floats = await client.embeddings.create({ model: MODEL, input: TEXTS, encoding_format: "float" });
  assertClose(vectors(floats), await embed(TEXTS));
  const base64 = await client.embeddings.create({ model: MODEL, input: TEXTS, encoding_format: "base64" });
  assert.deepEqual(vectors(base64), await embed(TEXTS, { encoding_format: "base64" }));
});

test("token ids", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: [[101, 2460, 102]] });
  assertClose(vectors(answer), await embed(["short"]));
});

test("dimensions", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: TEXTS, dimensions: WIDTH });
  assertClose(vectors(answer), await embed(TEXTS));
  await assert.rejects(client.embeddings.create({ model: MODEL, input: TEXTS, dimensions: 100 }), (error) => {
    return error instanceof BadRequestError && error.param === "dimensions";
  });
});

test("2048 texts", async () => {
  assertClose(vectors(await client.embeddings.create({ model: MODEL, input: MANY })), await embed(MANY));
});

test("many requests at once", async () => {
  const texts = MANY.slice(0, 64);
  const answers = await Promise.all(texts.map((input) => client.embeddings.create({ model: MODEL, input })));
  assertClose(answers.map((answer) => vectors(answer)[0]), await embed(texts));
});

test("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id, ...model.aliases);
  assert.ok(names.includes(MODEL));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test("errors", async () => {
  await assert.rejects(client.embeddings.create({ model: "unknown", input: "a" }), (error) => {
    assert.ok(error instanceof NotFoundError);
    assert.match(error.message, /'unknown'/);
    return error.code === "model_not_found" && Boolean(error.requestID);
  });
  await assert.rejects(client.embeddings.create({ model: MODEL, input: TOO_LONG }), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.match(error.message, /maximum context length is 256 tokens/);
    return error.code === "context_length_exceeded" && error.param === "input";
  });
});

test("api key", async () => {
  const options = { baseURL: `${PROTECTED_URL}/v1` };
  const wrong = new OpenAI({ ...options, apiKey: "wrong" });
  await assert.rejects(wrong.embeddings.create({ model: MODEL, input: "a" }), AuthenticationError);
  const right = new OpenAI({ ...options, apiKey: KEY });
  assertClose(vectors(await right.embeddings.create({ model: MODEL, input: "a" })), await embed(["a"]));
});

test("rate limit", async () => {
  const impatient = new OpenAI({ baseURL: `${PROTECTED_URL}/v1`, apiKey: KEY, maxRetries: 0 });
  const input = Array(9).fill("word ".repeat(200));
  const asked = Array.from({ length: 6 }, () => impatient.embeddings.create({ model: MODEL, input }));
  const refused = (await Promise.allSettled(asked)).filter((answer) => answer.status === "rejected");
  assert.ok(refused.length > 0 && refused.length < asked.length);
  assert.ok(refused.every((answer) => answer.reason instanceof RateLimitError));
});
