// Helpers for elements, fields and number formats.

const $ = (id) => document.getElementById(id);
const url = (path) => new URL(path, document.baseURI).href;
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const unique = (values) => [...new Set(values)];

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function section(title, ...children) {
  return make("section", {}, make("h2", {}, title), ...children);
}

// Builds its content when it is first opened, so that a page with 500 texts stays fast.
function folded(title, build, isOpen = false) {
  const node = make("details", {}, make("summary", {}, title));
  const fill = () => { if (node.open && node.childElementCount === 1) { node.append(build()); paint(node); } };
  node.addEventListener("toggle", fill);
  node.open = isOpen;
  fill();
  return node;
}

// If the field has a blank line, blank lines separate texts. Otherwise each line is a text.
function texts(id) {
  const value = $(id).value.trim();
  const parts = /\n[^\S\n]*\n/.test(value) ? value.split(/\n(?:[^\S\n]*\n)+/) : value.split("\n");
  return parts.map((part) => part.trim()).filter(Boolean);
}

function number(id) {
  return $(id).value.trim() && !$(id).disabled ? Number($(id).value) : undefined;
}

function chosen(id) {
  return $(id).value || undefined;
}

function bars(entries) {
  const scores = entries.map((entry) => entry.score);
  const low = scores.reduce((a, b) => Math.min(a, b), 0);
  const high = scores.reduce((a, b) => Math.max(a, b), 1);  // Logits may lie outside 0 to 1.
  return entries.map(({ text, score, place }) => {
    const fill = make("div", { class: "fill" });
    fill.style.width = `${(100 * (score - low)) / (high - low)}%`;
    const head = make("div", { class: "line" }, Array.isArray(text) ? pair(text) : clamped(text));
    if (place) head.append(make("span", { class: "place" }, place));
    head.append(make("span", { class: "score" }, score.toFixed(4)));
    return make("li", {}, head, make("div", { class: "track", "aria-hidden": "true" }, fill));
  });
}

function clamped(item, tag = "span") {
  const text = textOf(item);
  return make(tag, { class: item.thumb ? "text pictured" : "text clamp", dir: "auto", title: text }, ...thumb(item), text);
}

function line(item) {
  return make("span", { class: "one-line", dir: "auto", title: textOf(item) }, ...thumb(item), textOf(item));
}

function pair(both) {
  return make("div", { class: "pair" }, ...both.map(line));
}

function card(text, ...content) {
  return make("section", { class: "card" }, clamped(text, "h2"), ...content);
}
