// The selected model: its properties, its available tasks, and the state of the server.

const cards = new Map();  // Served names to their entries of /v1/models.
const NO_FACTS = {
  kind: "embedding", tasks: ["embed", "score"], outputs: ["dense"], sequence_pooling: [], prompts: {},
  matryoshka_dimensions: [], embedding_size: 0, num_labels: 0, modalities: ["text"],
};
const KINDS = {
  embedding: "embedding model",
  sequence_classifier: "classifier",
  cross_encoder: "reranker (cross-encoder)",
  token_classifier: "token classifier",
};
const TRAINED_FOR = { dense: "embed", sparse: "sparse", multi_vector: "multi" };

const facts = () => cards.get($("model").value)?.facts ?? NO_FACTS;
const isKnown = () => !cards.size || Boolean(cards.get($("model").value)?.facts);
const longest = () => cards.get($("model").value)?.max_model_len ?? Infinity;

// Returns why the model cannot run a task; undefined if it can.
function lack(task) {
  const { kind, tasks, outputs } = facts();
  const given = outputs.includes("sparse") ? "sparse vectors, not dense ones" : "token vectors, not text vectors";
  const gives = {
    embedding: `returns ${given}`,
    sequence_classifier: "returns classes, not vectors",
    cross_encoder: "returns scores of text pairs, not vectors",
    token_classifier: "returns classes of tokens, not vectors",
  }[kind];
  switch (task) {
    case "embed":
      return tasks.includes("embed") ? undefined : gives;
    case "rerank":
    case "score":
      return tasks.includes("score") ? undefined : "cannot compare texts";
    case "classify":
      if (["classify", "token_classify", "embed"].some((own) => tasks.includes(own))) return undefined;
      return kind === "cross_encoder" ? "has no classes for single texts" : `has no classes, and ${gives}`;
    case "sparse":
      if (tasks.includes("sparse_embed")) return undefined;
      return kind === "embedding" ? "was not trained for sparse vectors" : gives;
    case "multi":
      if (tasks.includes("token_embed")) return undefined;
      return kind === "embedding" ? "does not return token vectors" : gives;
  }
  return undefined;
}

const usable = () => TASKS.filter((task) => lack(task) === undefined);

function bestTask() {
  const able = usable();
  return facts().outputs.map((output) => TRAINED_FOR[output]).find((task) => able.includes(task)) ?? able[0];
}

function offer() {
  const reasons = new Map();
  for (const task of TASKS) {
    const reason = lack(task), tab = $(`${task}-tab`);
    tab.setAttribute("aria-disabled", reason !== undefined);
    tab.title = reason === undefined ? "" : `${$("model").value} ${reason}`;
    if (reason !== undefined) reasons.set(reason, [...(reasons.get(reason) ?? []), tab.textContent]);
  }
  const lines = [...reasons].map(([reason, names]) => {
    return make("li", {}, make("b", {}, names.join(", ")), `: ${$("model").value} ${reason}.`);
  });
  $("lacking").replaceChildren(...lines);
  $("lacking").hidden = !lines.length;
  $("classify-own").hidden = facts().kind !== "embedding";
  showFacts();
  fillFields();
  for (const task of WITH_IMAGES) showImages(task);
  for (const task of TASKS) if (isUntouched(task)) useExample(task, examplesOf(task)[0]);
  if (!usable().includes(current)) choose(bestTask());
  countShown();
}

function showFacts() {
  const { kind, embedding_size, is_matryoshka, matryoshka_dimensions, sequence_pooling, ...own } = facts();
  const { aliases = [], status } = cards.get($("model").value) ?? {};
  const entries = [["Kind", isKnown() ? KINDS[kind] : "unknown until it is loaded"]];
  if (aliases.length) entries.push(["Also called", aliases.join(", ")]);
  if (status && status.value !== "loaded") entries.push(["In memory", `${status.value}; a request loads it`]);
  if (embedding_size) {
    let width = embedding_size.toLocaleString("en");
    if (matryoshka_dimensions.length) width += `, or ${matryoshka_dimensions.join(", ")}`;
    else if (is_matryoshka) width += ", or any smaller number";
    if (own.outputs.join() === "multi_vector") width += " per token";
    entries.push(["Dimensions", width]);
  }
  if (own.num_labels && kind !== "cross_encoder") entries.push(["Classes", own.num_labels.toLocaleString("en")]);
  if (readsImages()) entries.push(["Reads", "texts and images"]);
  if (longest()) entries.push(["Longest input", plural(longest(), "token")]);
  if (kind === "embedding" && sequence_pooling.length) {
    entries.push(["Pooling", sequence_pooling.join(", ").toLowerCase().replaceAll("_", " ")]);
  }
  if (isKnown()) entries.push(["Weights", `${own.model_type}, ${own.dtype}`]);
  const nodes = entries.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  if (kind === "embedding") nodes.push(make("div", {}, make("dt", {}, "Prompts"), make("dd", {}, prompts(own))));
  $("facts").replaceChildren(...nodes);
}

function prompts({ prompts, default_prompt_name }) {
  const all = Object.entries(prompts);
  if (!all.length) return "none";
  const rows = all.map(([name, text]) => {
    const title = name === default_prompt_name ? `${name} (the default)` : name;
    return make("li", {}, make("b", {}, title), " ", make("q", { dir: "auto" }, text));
  });
  return folded(all.length.toLocaleString("en"), () => make("ul", {}, ...rows));
}

function fillFields() {
  const { prompts, default_prompt_name, embedding_size, matryoshka_dimensions, is_matryoshka } = facts();
  const names = Object.keys(prompts);
  for (const select of document.querySelectorAll(".prompt")) {
    const hasDefault = default_prompt_name && select.id !== "tokenize-prompt", before = select.value;
    const unnamed = hasDefault ? `default (${default_prompt_name})` : "no prompt";
    const options = [["", unnamed], ...names.map((name) => [name, name])];
    select.replaceChildren(...options.map(([value, name]) => make("option", { value }, name)));
    select.value = names.includes(before) ? before : "";
    select.disabled = !names.length;
    select.title = names.length ? "" : "The model has no prompts.";
  }
  const canCut = matryoshka_dimensions.length > 0 || is_matryoshka;
  $("embed-dimensions").disabled = !canCut;
  $("embed-dimensions").max = embedding_size;
  $("embed-dimensions").placeholder = embedding_size || "";
  $("embed-limit").placeholder = Number.isFinite(longest()) ? longest() : "";
  $("widths").replaceChildren(...matryoshka_dimensions.map((width) => make("option", { value: width })));
  $("widths-hint").textContent = canCut ? "" : "This model was not trained for fewer dimensions (Matryoshka).";
}

async function load() {
  const { data } = await (await fetch(url("v1/models"))).json(), before = $("model").value;
  for (const model of data) cards.set(model.id, model);
  $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  if (cards.has(before)) $("model").value = before;
  offer();
  if (!location.hash.slice(1)) choose(bestTask());
  $("version").textContent = `penstock ${(await (await fetch(url("version"))).json()).version}`;
}

// Returns whether the state of a model has changed since the cards were read.
const hasNews = (states) => states.join() !== [...cards.values()].map((card) => card.status?.state).join();

let timer;
async function watch() {
  clearTimeout(timer);
  let text = "cannot be reached", name = "down";
  try {
    const response = await fetch(url("health/ready"));
    const states = Object.values((await response.json()).engines ?? {});
    if (response.ok && (!cards.size || hasNews(states))) await load();
    text = response.ok ? "ready" : states.find((state) => state !== "ready") ?? "starting";
    name = response.ok ? "ready" : text === "dead" ? "down" : "busy";
  } catch {
    cards.clear();  // A restarted server may serve other models.
  }
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = name;
  timer = setTimeout(watch, name === "ready" ? 15000 : 1500);
}
