// @huggingface/inference (npm): routes of TEI.

import assert from "node:assert/strict";
import { test } from "node:test";

import { InferenceClient } from "@huggingface/inference";

import * as http from "./plain_http.mjs";
import { CLASSIFIER_URL, DOCUMENTS, PROTECTED_URL, QUERY, TEXTS, URL, assertClose } from "./plain_http.mjs";

const connect = (url, token = "any") => new InferenceClient(token).endpoint(url);

test("embeddings equal plain HTTP", async () => {
  assertClose(await connect(URL).featureExtraction({ inputs: TEXTS }), await http.embed(TEXTS));
  assertClose(await connect(URL).featureExtraction({ inputs: TEXTS[0] }), await http.embed([TEXTS[0]]));
});

test("similarities equal plain HTTP", async () => {
  const inputs = { source_sentence: QUERY, sentences: DOCUMENTS };
  const { data } = await http.post("/v1/score", { text_1: QUERY, text_2: DOCUMENTS });
  assertClose(await connect(URL).sentenceSimilarity({ inputs }), data.map((row) => row.score));
});

test("classes equal plain HTTP", async () => {
  const [expected] = await http.post("/predict", { inputs: [[TEXTS[0]]] }, CLASSIFIER_URL);
  const found = await connect(CLASSIFIER_URL).textClassification({ inputs: TEXTS[0] });
  assert.deepEqual(found.map((row) => row.label), expected.map((row) => row.label));
  assertClose(found.map((row) => row.score), expected.map((row) => row.score));
});

test("errors have the message", async () => {
  const inputs = "a";
  await assert.rejects(connect(`${CLASSIFIER_URL}/embed`).featureExtraction({ inputs }), /does not support the task/);
  await assert.rejects(connect(PROTECTED_URL, "wrong").featureExtraction({ inputs }), /key/);
});

test("API key is accepted", async () => {
  assertClose(await connect(PROTECTED_URL, http.KEY).featureExtraction({ inputs: "a" }), await http.embed(["a"]));
});
