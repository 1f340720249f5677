// ollama (npm): embeddings and models under /api, and errors of generation.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Ollama } from "ollama";

import * as http from "./plain_http.mjs";
import { KEY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, assertClose } from "./plain_http.mjs";

const client = new Ollama({ host: http.URL });

test("embeddings equal plain HTTP", async () => {
  const answer = await client.embed({ model: MODEL, input: TEXTS, keep_alive: "5m" });
  assertClose(answer.embeddings, await http.embed(TEXTS));
  assert.equal(answer.model, MODEL);
  assert.ok(answer.prompt_eval_count > TEXTS.length);
  const tagged = await client.embed({ model: `${MODEL}:latest`, input: TEXTS[0] });
  assertClose(tagged.embeddings, await http.embed([TEXTS[0]]));
});

test("older call returns a vector", async () => {
  const { embedding } = await client.embeddings({ model: MODEL, prompt: TEXTS[0] });
  assert.equal(embedding.length, http.WIDTH);
});

test("models are described", async () => {
  const { models } = await client.list();
  assert.ok(models.some((model) => model.name === MODEL && model.size > 0));
  assert.ok((await client.ps()).models[0].name.endsWith(MODEL));
  assert.deepEqual((await client.show({ model: MODEL })).capabilities, ["embedding"]);
  assert.equal((await client.pull({ model: MODEL })).status, "success");
  for await (const step of await client.pull({ model: MODEL, stream: true })) {
    assert.equal(step.status, "success");
  }
});

test("errors have the message", async () => {
  await assert.rejects(client.embed({ model: "unknown", input: "a" }), /'unknown' does not exist/);
  await assert.rejects(client.embed({ model: MODEL, input: TOO_LONG, truncate: false }), /maximum context length/);
  await assert.rejects(client.generate({ model: MODEL, prompt: "Why?" }), /writes none/);
  await assert.rejects(new Ollama({ host: PROTECTED_URL }).embed({ model: MODEL, input: "a" }), /key/);
});

test("long text is cut and API key is accepted", async () => {
  const headers = { Authorization: `Bearer ${KEY}` };
  const answer = await new Ollama({ host: PROTECTED_URL, headers }).embed({ model: MODEL, input: TOO_LONG });
  assert.equal(answer.embeddings.length, 1);
});
