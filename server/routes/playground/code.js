// The last requests as curl commands and as Python code, and the last response.

const MAX_SHOWN_CHARS = 20000, KEY_VARIABLE = "PENSTOCK_API_KEY";
const OPENAI_FIELDS = ["model", "input", "dimensions"];  // Named parameters of the client's create().

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function asCurl({ url, body, hasKey }) {
  const parts = [`curl ${quoted(url)}`, "-H 'Content-Type: application/json'"];
  if (hasKey) parts.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  return [...parts, `-d ${quoted(JSON.stringify(body, shortened, 2))}`].join(" \\\n  ");
}

function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = indent + "    ", isList = Array.isArray(value);
  const items = isList
    ? value.map((item) => literal(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, inner)}`);
  const [open, close] = isList ? "[]" : "{}";
  const body = items.map((item) => `${inner}${item},\n`).join("");
  return body ? `${open}\n${body}${indent}${close}` : open + close;
}

function asPython(exchanges) {
  const hasKey = exchanges.some((exchange) => exchange.hasKey);
  const key = hasKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
  const head = `${hasKey ? "import os\n\n" : ""}from openai import OpenAI  # pip install openai

client = OpenAI(base_url=${JSON.stringify(url("v1"))}, api_key=${key})
`;
  return head + exchanges.map(asCall).join("\n");
}

function asCall({ url, path, body: sentBody }) {
  const body = JSON.parse(JSON.stringify(sentBody, shortened));
  if (path !== "v1/embeddings") {
    return `answer = client.post(
    ${JSON.stringify(url)},
    body=${literal(body, "    ")},
    cast_to=object,
)
print(answer)
`;
  }
  const own = Object.entries(body).filter(([name]) => OPENAI_FIELDS.includes(name));
  const more = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_FIELDS.includes(name)));
  if (Object.keys(more).length) own.push(["extra_body", more]);
  const fields = own.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  return `answer = client.embeddings.create(
${fields})
for row in answer.data:
    print(row.index, len(row.embedding), row.embedding[:4])
`;
}

function asAnswer({ answer, text }) {
  if (answer === null || text.length > 50 * MAX_SHOWN_CHARS) return text;
  const indented = JSON.stringify(answer, shortened, 2);
  return indented.replace(/\[[\s\d.,eE+-]+\]/g, (numbers) => numbers.replace(/\s+/g, " "));
}

const VIEWS = {
  curl: (exchanges) => exchanges.map(asCurl).join("\n\n"),
  python: asPython,
  answer: (exchanges) => exchanges.map(asAnswer).join("\n\n"),
};
let view = "curl", code = "";

function showRequest() {
  const exchanges = sent[current];
  $("request").hidden = !exchanges?.length;
  if (!exchanges?.length) return;
  code = VIEWS[view](exchanges);
  const rest = code.length - MAX_SHOWN_CHARS;
  $("code").textContent = rest > 0 ? `${code.slice(0, MAX_SHOWN_CHARS)}\n… ${plural(rest, "character")} more` : code;
  for (const button of document.querySelectorAll("[data-view]")) {
    button.setAttribute("aria-pressed", button.dataset.view === view);
  }
}

async function copy() {
  try {
    await navigator.clipboard.writeText(code);
    $("copy").textContent = "Copied";
  } catch {  // Without TLS, browsers allow clipboard access on localhost only.
    $("code").textContent = code;
    getSelection().selectAllChildren($("code"));
    $("copy").textContent = "Selected";
  }
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
}
