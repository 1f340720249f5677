// @huggingface/inference (npm) against TEI's routes.

import assert from "node:assert/strict";
import { test } from "node:test";

import { InferenceClient } from "@huggingface/inference";

import {
  CLASSIFIER_URL,
  DOCUMENTS,
  KEY,
  PROTECTED_URL,
  QUERY,
  TEXTS,
  URL,
  assertClose,
  embed,
  post,
} from "./plain_http.mjs";

const client = new InferenceClient("any").endpoint(URL);

test("feature extraction", async () => {
  assertClose(await client.featureExtraction({ inputs: TEXTS }), await embed(TEXTS));
  assertClose(await client.featureExtraction({ inputs: TEXTS[0] }), await embed([TEXTS[0]]));
});

test("sentence similarity", async () => {
  const inputs = { source_sentence: QUERY, sentences: DOCUMENTS };
  const { data } = await post("/v1/score", { text_1: QUERY, text_2: DOCUMENTS });
  assertClose(await client.sentenceSimilarity({ inputs }), data.map((row) => row.score));
});

test("text classification", async () => {
  const classifier = new InferenceClient("any").endpoint(CLASSIFIER_URL);
  const [expected] = await post("/predict", { inputs: [[TEXTS[0]]] }, CLASSIFIER_URL);
  const found = await classifier.textClassification({ inputs: TEXTS[0] });
  assert.deepEqual(found.map((row) => row.label), expected.map((row) => row.label));
  assertClose(found.map((row) => row.score), expected.map((row) => row.score));
});

test("errors", async () => {
  const wrong = new InferenceClient("any").endpoint(`${CLASSIFIER_URL}/embed`);
  await assert.rejects(wrong.featureExtraction({ inputs: "a" }), /does not support the task/);
});

test("api key", async () => {
  const wrong = new InferenceClient("wrong").endpoint(PROTECTED_URL);
  await assert.rejects(wrong.featureExtraction({ inputs: "a" }), /key/);
  const right = new InferenceClient(KEY).endpoint(PROTECTED_URL);
  assertClose(await right.featureExtraction({ inputs: "a" }), await embed(["a"]));
});
