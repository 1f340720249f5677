// The tokenize task, and token counts below text fields.

const MAX_TOKENS = 5000, MAX_COUNTED_CHARS = 20000, COUNT_AFTER_MS = 400;

async function tokenize(ask) {
  const inputs = texts("tokenize-texts");
  const add_special_tokens = $("tokenize-special").checked;
  const answer = await ask("tokenize", { inputs, add_special_tokens, prompt_name: chosen("tokenize-prompt") });
  const names = await tokenNames(ask, answer.flat().filter(({ special }) => special).map(({ id }) => id));
  const limit = longest();
  let left = MAX_TOKENS, total = 0;
  const cards = [];
  answer.forEach((tokens, i) => {
    total += tokens.length;
    if (left <= 0) return;
    const chips = tokens.slice(0, left).map(({ id, text, special }, at) => {
      const chip = make("span", { class: special ? "special" : at >= limit ? "beyond" : "", title: `token ${id}` });
      chip.append(special ? names.get(id) ?? "special" : text, make("i", {}, String(id)));
      return chip;
    });
    left -= chips.length;
    let note = plural(tokens.length, "token");
    if (tokens.length > limit) note += `, ${tokens.length - limit} beyond the limit of ${limit}`;
    if (chips.length < tokens.length) note += `; shown: ${chips.length}`;
    const content = make("div", { class: "tokens pieces", dir: "auto" }, ...chips);
    cards.push(card(inputs[i], make("p", { class: "facts" }, note), content));
  });
  if (cards.length < inputs.length) {
    cards.push(make("p", { class: "facts" }, `Shown: the first ${plural(cards.length, "text")}.`));
  }
  return [[plural(inputs.length, "text"), plural(total, "token")], ...cards];
}

// Adds a line below a field with its number of texts and tokens.
function countBelow(field) {
  const line = make("output", { class: "count", for: field.id });
  field.after(line);
  let timer, last;
  const count = async () => {
    const inputs = texts(field.id), own = last = {};
    const start = field.value.trim().includes("\n") ? plural(inputs.length, "text") : inputs.length ? "1 text" : "";
    line.classList.remove("over");
    line.textContent = start;
    if (!inputs.length || !cards.size || field.value.length > MAX_COUNTED_CHARS) return;
    const select = field.form.querySelector(".prompt");
    let added;
    try {
      const { answer } = await post("tokenize", { inputs, prompt_name: select?.value || undefined });
      const lengths = answer.map((tokens) => tokens.length), most = Math.max(...lengths), limit = longest();
      const total = plural(lengths.reduce((a, b) => a + b), "token");
      added = `${total}, the longest text ${most.toLocaleString("en")} of ${limit.toLocaleString("en")}`;
      if (own === last) line.classList.toggle("over", most > limit);
    } catch (error) {
      added = error instanceof Rejection ? messageOf(error.exchange) : "the server cannot be reached";
    }
    if (own === last) line.textContent = `${start} · ${added}`;
  };
  const soon = () => { clearTimeout(timer); timer = setTimeout(count, COUNT_AFTER_MS); };
  field.addEventListener("input", soon);
  field.form.querySelector(".prompt")?.addEventListener("change", soon);
  field.count = soon;
}

function countShown() {
  for (const field of document.querySelectorAll(`#${current} [data-counted]`)) field.count();
}
