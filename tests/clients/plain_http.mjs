// plain_http.py for Node, without packages.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const URL = process.env.SERVER_URL;
export const MODEL = "all-MiniLM-L6-v2";
export const WIDTH = 384;
export const RERANKER_URL = process.env.RERANKER_URL;
export const RERANKER = "reranker";
export const CLASSIFIER_URL = process.env.CLASSIFIER_URL;
export const PROTECTED_URL = process.env.PROTECTED_URL;
export const KEY = process.env.PROTECTED_KEY;

export const TEXTS = JSON.parse(readFileSync(process.env.EXPECTED_FILE, "utf8")).texts;
export const MANY = Array.from({ length: 2048 }, (_, i) => `text number ${i}`);
export const QUERY = "What holds back the water?";
export const DOCUMENTS = [
  "A song about the sea.",
  "The gate holds back the water.",
  "Bread is baked in an oven.",
  "A dam.",
];
export const TOO_LONG = "word ".repeat(1000);

export async function post(path, body, url = URL) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
  assert.equal(response.status, 200);
  return response.json();
}

/** A vector for each text. */
export async function embed(texts, fields = {}) {
  return (await post("/v1/embeddings", { input: texts, ...fields })).data.map((row) => row.embedding);
}

/** Index and score of each document for QUERY, best first. */
export async function rerank(url = RERANKER_URL) {
  const { results } = await post("/v2/rerank", { query: QUERY, documents: DOCUMENTS }, url);
  return results.map((row) => [row.index, row.relevance_score]);
}

/** Compares numbers, or nested lists of numbers. */
export function assertClose(found, expected, tolerance = 1e-6) {
  if (typeof expected === "number") {
    assert.ok(Math.abs(found - expected) <= tolerance, `${found} is not ${expected}`);
    return;
  }
  assert.equal(found.length, expected.length);
  expected.forEach((other, i) => assertClose(found[i], other, tolerance));
}
