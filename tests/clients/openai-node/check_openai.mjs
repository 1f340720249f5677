// openai (npm): embeddings and models.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI, { AuthenticationError, BadRequestError, NotFoundError, RateLimitError } from "openai";

import * as http from "./plain_http.mjs";
import { KEY, MANY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, URL, assertClose } from "./plain_http.mjs";

const connect = (url = URL, apiKey = "any", maxRetries = 0) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries });
const client = connect();
const create = (input, options = {}) => client.embeddings.create({ model: MODEL, input, ...options });
const vectors = (answer) => answer.data.map((row) => row.embedding);

test("embeddings equal plain HTTP", async () => {
  const answer = await create(TEXTS); // requests base64
  assert.equal(answer.model, MODEL);
  assert.ok(answer.usage.total_tokens > TEXTS.length);
  for (const input of [TEXTS, TEXTS[0], [[101, 2460, 102]], MANY]) {
    assertClose(vectors(await create(input)), await http.embed(input));
  }
});

test("options are sent", async () => {
  const floats = await create(TEXTS, { encoding_format: "float", dimensions: http.WIDTH });
  assertClose(vectors(floats), await http.embed(TEXTS));
  const base64 = await create(TEXTS, { encoding_format: "base64" });
  assert.deepEqual(vectors(base64), await http.embed(TEXTS, { encoding_format: "base64" }));
});

test("concurrent requests get their own vectors", async () => {
  const texts = MANY.slice(0, 64);
  const answers = await Promise.all(texts.map((input) => create(input)));
  assertClose(answers.map((answer) => vectors(answer)[0]), await http.embed(texts));
});

test("models are listed", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id, ...model.aliases);
  assert.ok(names.includes(MODEL));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test("errors are typed", async () => {
  for (const [input, options, kind, code, param] of [
    ["a", { model: "unknown" }, NotFoundError, "model_not_found", "model"],
    [TOO_LONG, {}, BadRequestError, "context_length_exceeded", "input"],
    ["a", { dimensions: 100 }, BadRequestError, null, "dimensions"],
  ]) {
    await assert.rejects(create(input, options), (error) => {
      assert.ok(error instanceof kind);
      assert.deepEqual([error.code ?? null, error.param], [code, param]);
      return Boolean(error.requestID);
    });
  }
});

test("API key is checked", async () => {
  const request = { model: MODEL, input: "a" };
  await assert.rejects(connect(PROTECTED_URL, "wrong").embeddings.create(request), AuthenticationError);
  assertClose(vectors(await connect(PROTECTED_URL, KEY).embeddings.create(request)), await http.embed(["a"]));
});

test("rate limit is a typed error", async () => {
  const limited = connect(PROTECTED_URL, KEY);
  const input = Array(9).fill("word ".repeat(200));
  const sent = Array.from({ length: 6 }, () => limited.embeddings.create({ model: MODEL, input }));
  const rejected = (await Promise.allSettled(sent)).filter((answer) => answer.status === "rejected");
  assert.ok(rejected.length > 0 && rejected.length < sent.length);
  assert.ok(rejected.every((answer) => answer.reason instanceof RateLimitError));
});
