// ollama (npm) against /api: embeddings, the list of models, and what there is none of.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Ollama } from "ollama";

import { KEY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, URL, WIDTH, assertClose, embed } from "./plain_http.mjs";

const client = new Ollama({ host: URL });

test("embed", async () => {
  const answer = await client.embed({ model: MODEL, input: TEXTS, keep_alive: "5m" });
  assertClose(answer.embeddings, await embed(TEXTS));
  assert.equal(answer.model, MODEL);
  assert.ok(answer.prompt_eval_count > TEXTS.length);
});

test("one text, and a tag", async () => {
  const answer = await client.embed({ model: `${MODEL}:latest`, input: TEXTS[0] });
  assertClose(answer.embeddings, await embed([TEXTS[0]]));
});

test("the older call", async () => {
  const { embedding } = await client.embeddings({ model: MODEL, prompt: TEXTS[0] });
  assert.equal(embedding.length, WIDTH);
});

test("truncate", async () => {
  assert.equal((await client.embed({ model: MODEL, input: TOO_LONG })).embeddings.length, 1);
  await assert.rejects(client.embed({ model: MODEL, input: TOO_LONG, truncate: false }), /maximum context length/);
});

test("models", async () => {
  const { models } = await client.list();
  assert.ok(models.some((model) => model.name === MODEL && model.size > 0));
  assert.ok((await client.ps()).models[0].name.endsWith(MODEL));
  assert.deepEqual((await client.show({ model: MODEL })).capabilities, ["embedding"]);
  assert.equal((await client.pull({ model: MODEL })).status, "success");
  for await (const step of await client.pull({ model: MODEL, stream: true })) {
    assert.equal(step.status, "success");
  }
});

test("errors", async () => {
  await assert.rejects(client.embed({ model: "unknown", input: "a" }), /'unknown' does not exist/);
  await assert.rejects(client.generate({ model: MODEL, prompt: "Why?" }), /writes none/);
});

test("API key", async () => {
  await assert.rejects(new Ollama({ host: PROTECTED_URL }).embed({ model: MODEL, input: "a" }), /API key|key/);
  const headers = { Authorization: `Bearer ${KEY}` };
  const answer = await new Ollama({ host: PROTECTED_URL, headers }).embed({ model: MODEL, input: "a" });
  assert.equal(answer.embeddings.length, 1);
});
