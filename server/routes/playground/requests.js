// Sends requests and shows their responses.

const sent = {};  // Task to its last exchanges (request and response).
const running = {};  // Task to the AbortController of its running request.

class Rejection extends Error {
  constructor(exchange) {
    super(`status ${exchange.status}`);
    this.exchange = exchange;
  }
}

class Unreachable extends Error {}

async function post(path, fields, signal) {
  const body = JSON.parse(JSON.stringify({ model: chosen("model"), ...fields }));  // Removes undefined fields.
  const headers = { "Content-Type": "application/json" };
  const key = $("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  const exchange = { url: url(path), path, body, hasKey: Boolean(key), answer: null };
  try {
    const response = await fetch(url(path), { method: "POST", headers, body: JSON.stringify(body), signal });
    exchange.text = await response.text();
    exchange.status = response.status;
    exchange.id = response.headers.get("x-request-id");
    exchange.retryAfter = response.headers.get("retry-after");
  } catch (error) {
    throw error.name === "AbortError" ? error : new Unreachable();
  }
  try { exchange.answer = JSON.parse(exchange.text); } catch { /* A proxy may send a body that is not JSON. */ }
  if (exchange.status !== 200 || exchange.answer === null) throw new Rejection(exchange);
  return exchange;
}

async function send(task) {
  if (running[task]) return running[task].abort();
  const button = document.querySelector(`#${task} .go button`), name = button.textContent;
  const { signal } = running[task] = new AbortController();
  const exchanges = [], began = performance.now();
  // Helper requests, such as token names, are not shown to the user.
  const ask = async (path, fields, isHelper = false) => {
    try {
      const exchange = await post(path, fields, signal);
      if (!isHelper) exchanges.push(exchange);
      return exchange.answer;
    } catch (error) {
      if (error instanceof Rejection) exchanges.push(error.exchange);
      throw error;
    }
  };
  button.textContent = "Stop";
  try {
    const [facts, ...nodes] = await RUN[task](ask);
    const ms = performance.now() - began;
    const usages = exchanges.map(({ answer }) => answer.usage?.total_tokens).filter((count) => count !== undefined);
    if (usages.length) facts.push(plural(usages.reduce((a, b) => a + b), "token"));
    facts.push(`${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms round trip`);
    put(task, make("p", { class: "facts", role: "status" }, facts.join(" · ")), ...nodes);
  } catch (error) {
    if (error instanceof Rejection) put(task, rejected(error.exchange));
    else if (error instanceof Unreachable) put(task, complaint("No response", "The server cannot be reached."));
    else if (error.name === "AbortError") put(task, complaint("Stopped", "The server cancels the request."));
    else {
      put(task, complaint("Error in this page", String(error)));
      throw error;
    }
    if (error instanceof Unreachable) watch();
  } finally {
    delete running[task];
    button.textContent = name;
    sent[task] = exchanges;
    showRequest();
  }
}

function put(task, ...nodes) {
  const result = document.querySelector(`#${task} .result`);
  result.replaceChildren(...nodes);
  paint(result);
}

function complaint(title, text, id) {
  const box = make("div", { class: "error", role: "alert" }, make("strong", {}, title), text);
  if (id) box.append(make("br"), make("small", {}, `request ${id}`));
  return box;
}

function messageOf({ answer, text }) {
  const error = answer?.error;
  const message = answer?.message ?? error?.message ?? (typeof error === "string" ? error : undefined);
  return String(message ?? (text.slice(0, 300) || "The response is empty."));
}

function rejected(exchange) {
  const again = exchange.retryAfter ? ` Try again in ${exchange.retryAfter} s.` : "";
  if (exchange.status === 401) $("key").focus();
  return complaint(`Status ${exchange.status}`, messageOf(exchange) + again, exchange.id);
}
