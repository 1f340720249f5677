// Tabs, colour theme, event listeners, and the start of the page.

const RUN = { embed, rerank, score, classify, sparse, multi, tokenize };
const TASKS = Object.keys(RUN);
const HINTS = Object.fromEntries(TASKS.map((task) => [task, document.querySelector(`#${task} .hint`)]));
let current = "embed";

function choose(task, focus) {
  current = task;
  for (const name of TASKS) {
    const tab = $(`${name}-tab`), chosen = name === task;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(name).hidden = !chosen;
  }
  if (focus) { $(`${task}-tab`).focus(); history.replaceState(null, "", `#${task}`); }
  showRequest();
  countShown();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";

function theme(name) {
  if (name) document.documentElement.style.colorScheme = name;
  $("theme").textContent = isDark() ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
  paint(document);
}

function remember(name) {
  try { localStorage.setItem("penstock-theme", name); } catch { /* A browser may forbid it. */ }
}

function remembered() {
  try { return localStorage.getItem("penstock-theme"); } catch { return null; }
}

for (const task of TASKS) {
  $(`${task}-tab`).addEventListener("click", () => { if (lack(task) === undefined) choose(task, true); });
  const form = document.querySelector(`#${task} form`);
  form.addEventListener("submit", (event) => { event.preventDefault(); send(task); });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if (!running[task]) form.requestSubmit();
  });
}
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const able = usable(), at = able.indexOf(current);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: able.length - 1 }[event.key];
  if (to !== undefined) { event.preventDefault(); choose(able[(to + able.length) % able.length], true); }
});
for (const button of document.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => { view = button.dataset.view; showRequest(); });
}
for (const box of document.querySelectorAll(".images")) acceptImages(box);
for (const field of document.querySelectorAll("[data-counted]")) countBelow(field);
$("copy").addEventListener("click", copy);
$("model").addEventListener("change", () => {
  for (const task of TASKS) {  // Results of the previous model.
    delete sent[task];
    put(task, HINTS[task]);
  }
  offer();
  showRequest();
});
$("key").addEventListener("change", countShown);
$("embed-cut").addEventListener("change", () => { $("embed-limit").disabled = chosen("embed-cut") === "NONE"; });
$("theme").addEventListener("click", () => {
  const name = isDark() ? "light" : "dark";
  remember(name);
  theme(name);
});
dark.addEventListener("change", () => theme());
for (const task of TASKS) useExample(task, examplesOf(task)[0]);
const wanted = location.hash.slice(1);
choose(TASKS.includes(wanted) ? wanted : "embed");
theme(remembered());
watch();
