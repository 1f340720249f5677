// Sparse vectors and token vectors.

const MAX_WEIGHTS = 24, MAX_NAMED = 4000;

// Returns a Map of token id to text.
async function tokenNames(ask, ids) {
  const known = unique(ids).slice(0, MAX_NAMED);
  if (!known.length) return new Map();
  const named = await ask("decode", { ids: known.map((id) => [id]), skip_special_tokens: false }, true);
  return new Map(known.map((id, i) => [id, named[i].trim() || `#${id}`]));
}

async function sparse(ask) {
  const input = texts("sparse-texts");
  const fields = { input, outputs: ["sparse"], prompt_name: chosen("sparse-prompt") };
  const vectors = (await ask("v1/encode", fields)).data.map((row) => row.sparse);
  const heaviest = vectors.map(({ indices, values }) => {
    const entries = indices.map((id, at) => ({ id, weight: values[at] }));
    return entries.sort((a, b) => b.weight - a.weight).slice(0, MAX_WEIGHTS);
  });
  const names = await tokenNames(ask, heaviest.flat().map(({ id }) => id));
  const cards = vectors.map(({ indices }, i) => {
    const most = heaviest[i][0]?.weight ?? 1;
    const chips = heaviest[i].map(({ id, weight }) => {
      const chip = make("span", { class: "weight", title: `token ${id}` }, names.get(id) ?? `#${id}`);
      chip.style.setProperty("--share", (weight / most).toFixed(3));
      chip.append(make("i", {}, weight.toFixed(2)));
      return chip;
    });
    const rest = indices.length - heaviest[i].length;
    const count = `${plural(indices.length, "weight")} above 0`;
    const note = rest > 0 ? `${count}; shown: the ${heaviest[i].length} largest` : count;
    return card(input[i], make("div", { class: "tokens" }, ...chips), make("p", { class: "facts" }, note));
  });
  const closeness = vectors.length > 1 ? [overlaps(vectors.slice(0, MAX_COMPARED), input)] : [];
  return [[plural(vectors.length, "text")], ...closeness, ...cards];
}

function overlaps(vectors, input) {
  const width = vectors.reduce((most, { indices }) => Math.max(most, (indices.at(-1) ?? 0) + 1), 0);
  const products = vectors.map(({ indices, values }) => {
    const spread = new Float64Array(width);
    indices.forEach((id, at) => { spread[id] = values[at]; });
    return vectors.map((other) => other.indices.reduce((sum, id, at) => sum + spread[id] * other.values[at], 0));
  });
  const names = numbered(input.slice(0, vectors.length));
  return section("Dot product", matrix({
    label: "Dot product of every pair of texts",
    corner: "Text",
    rows: names,
    columns: names,
    value: (i, k) => (i === k ? NaN : products[i][k]),
  }));
}

async function multi(ask) {
  const isTrained = facts().outputs.includes("multi_vector");
  const encode = (input, side) => ask("v1/encode", {
    input,
    outputs: ["multi_vector"],
    input_type: side,
    normalize: isTrained ? undefined : true,
    return_token_ids: true,
    encoding_format: "base64",
  });
  const documents = itemsOf("multi", "multi-documents");
  const [query] = tokenRows((await encode([$("multi-query").value], "query")).data);
  const rows = tokenRows((await encode(documents.map(asInput), "document")).data);
  const names = await tokenNames(ask, [query, ...rows].flatMap(({ ids }) => ids));
  const named = (ids) => ids.map((id) => names.get(id) ?? `#${id}`);
  const found = rows.map((row, at) => {
    const tokens = row.patches ? patchNames(named(row.ids), row.patches) : named(row.ids);
    return { at, tokens, patches: row.patches, ...maxSim(query.vectors, row.vectors) };
  });
  found.sort((a, b) => b.score - a.score);
  const entries = found.map(({ at, score }) => ({ text: documents[at], score, place: `document ${at + 1}` }));
  const order = section("MaxSim", make("ol", { class: "bars" }, ...bars(entries)));
  const cards = found.map(({ at, tokens, patches, best, cosines, score }, place) => {
    const pairs = () => tokenPairs(named(query.ids), tokens, best, cosines);
    const page = () => make("div", {}, pageMap(documents[at], named(query.ids), cosines, patches),
      folded("Closest part of each query token", pairs));
    const title = `Document ${at + 1}, ${patches ? "query tokens on the page" : "token by token"}: ${score.toFixed(4)}`;
    return folded(title, patches ? page : pairs, place < 1);
  });
  const summary = [`${plural(query.ids.length, "query vector")}`, ...counts(documents)];
  const note = `${$("model").value} was trained for one vector per text, not for token vectors.`;
  const notes = isTrained ? [] : [make("p", { class: "facts" }, note)];
  return [summary, ...notes, order, make("section", { class: "folds" }, ...cards)];
}

// Decodes base64 of float32 rows, one row per id.
function tokenRows(data) {
  return data.map(({ token_ids: ids, multi_vector: text, patches }) => {
    const binary = atob(text), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    const values = new Float32Array(bytes.buffer), width = values.length / Math.max(ids.length, 1);
    return { ids, patches, vectors: ids.map((_, i) => values.subarray(i * width, (i + 1) * width)) };
  });
}

// The score is the sum, over query tokens, of the similarity to the closest document token.
function maxSim(query, document) {
  const cosines = query.map((row) => document.map((other) => dot(row, other)));
  const best = cosines.map((row) => row.reduce((most, cosine, k) => (cosine > row[most] ? k : most), 0));
  return { cosines, best, score: document.length ? best.reduce((sum, k, i) => sum + cosines[i][k], 0) : 0 };
}

function tokenPairs(query, document, best, cosines) {
  if (!document.length) return make("p", { class: "facts" }, "All tokens of this document are left out.");
  const rows = query.map((token, i) => {
    const cosine = cosines[i][best[i]], fill = make("div", { class: "fill" });
    fill.style.width = `${100 * Math.max(0, Math.min(1, cosine))}%`;
    const cells = [token, document[best[i]], cosine.toFixed(4)].map((text) => make("td", { dir: "auto" }, text));
    cells[2].append(make("div", { class: "track", "aria-hidden": "true" }, fill));
    return make("tr", {}, ...cells);
  });
  const titles = ["Query token", "Closest document token", "Similarity"];
  const heads = titles.map((text) => make("th", { scope: "col" }, text));
  const head = make("thead", {}, make("tr", {}, ...heads));
  const title = "Closest document token of each query token";
  const list = make("table", { class: "pairs", "aria-label": title }, head, make("tbody", {}, ...rows));
  const label = "Similarity of every query token with every document token";
  const named = (tokens) => tokens.map((text) => ({ name: text, text }));
  const every = folded("All pairs of tokens", () => matrix({
    label, corner: "Query", rows: named(query), columns: named(document), value: (i, k) => cosines[i][k],
  }));
  const attributes = { class: "scroll", role: "group", tabindex: "0", "aria-label": title };
  return make("div", {}, make("div", attributes, list), every);
}
