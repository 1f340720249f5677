// Embeddings: cosine similarities and a heat map of the vectors.

const MAX_COMPARED = 1000, MAX_CLOSEST = 5, NUM_OPEN_STRIPS = 8, MAX_STRIPS = 500;

async function embed(ask) {
  const items = itemsOf("embed", "embed-texts");
  const answer = await ask("v1/embeddings", {
    input: items.map(asInput),
    prompt_name: chosen("embed-prompt"),
    dimensions: number("embed-dimensions"),
    ...truncation(),
  });
  const rows = [...answer.data].sort((a, b) => a.index - b.index).map((row) => row.embedding);
  const facts = [...counts(items), `${plural(rows[0].length, "number")} each`];
  return [facts, ...(rows.length > 1 ? [similarities(rows, items)] : []), heatMap(rows, items)];
}

function truncation() {
  const cut = chosen("embed-cut"), limit = number("embed-limit");
  if (cut === "NONE" || limit === undefined) return { truncate: cut };
  return { truncate_prompt_tokens: limit, truncation_side: { START: "left", END: "right" }[cut] };
}

function unitRows(rows) {
  return rows.map((row) => {
    const length = Math.sqrt(dot(row, row)), unit = new Float64Array(row.length);
    for (let i = 0; i < unit.length; i++) unit[i] = row[i] / length;
    return unit;
  });
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

const numbered = (items) => items.map((item, i) => ({ name: String(i + 1), text: textOf(item), thumb: item.thumb }));

// With texts and images, only pairs of both are compared first: images are closer to each other than to texts.
function similarities(rows, items) {
  const units = unitRows(rows.slice(0, MAX_COMPARED));
  const cosines = units.map((_, i) => new Float64Array(units.length).fill(NaN));
  const isImage = items.map((item) => Boolean(item.uri)), hasBoth = new Set(isImage.slice(0, units.length)).size > 1;
  const closest = [];
  for (let i = 0; i < units.length; i++) {
    for (let k = 0; k < i; k++) {
      const cosine = cosines[i][k] = cosines[k][i] = dot(units[i], units[k]);
      if (hasBoth && isImage[i] === isImage[k]) continue;
      if (closest.length === MAX_CLOSEST && cosine <= closest.at(-1).score) continue;
      closest.push({ score: cosine, pair: [k, i] });
      closest.sort((a, b) => b.score - a.score);
      closest.length = Math.min(closest.length, MAX_CLOSEST);
    }
  }
  const pairs = closest.filter(({ score }) => Number.isFinite(score)).map(({ score, pair: [a, b] }) => {
    return { score, text: [a, b].map((at) => ({ name: `${at + 1} ${textOf(items[at])}`, thumb: items[at].thumb })) };
  });
  const list = make("ol", { class: "bars" }, ...bars(pairs));
  if (units.length === 2) return section("Cosine similarity", list);
  const all = [...units.keys()], names = numbered(items.slice(0, units.length));
  const shown = (kind, down, across) => matrix({
    label: `Cosine similarity of every pair of ${kind}`,
    corner: isImage[down[0]] ? "Image" : "Text",
    rows: down.map((i) => names[i]),
    columns: across.map((k) => names[k]),
    value: (i, k) => cosines[down[i]][across[k]],
  });
  const kind = counts(items).length > 1 ? "inputs" : isImage[0] ? "images" : "texts";
  const first = hasBoth
    ? shown("text and image", all.filter((i) => !isImage[i]), all.filter((i) => isImage[i]))
    : shown(kind, all, all);
  const own = section("Cosine similarity", first, make("h3", {}, "Closest pairs"), list);
  if (hasBoth) own.append(folded("All pairs", () => shown(kind, all, all)));
  if (rows.length > units.length) own.append(make("p", { class: "facts" }, `Compared: the first ${units.length}.`));
  return own;
}

function heatMap(rows, items) {
  const shown = rows.slice(0, MAX_STRIPS), width = rows[0].length;
  const sizes = shown.slice(0, 64).flat().map(Math.abs).sort((a, b) => a - b);
  const limit = sizes[Math.floor((sizes.length - 1) * 0.99)] || 1;  // A few outliers would make all other values pale.
  const strips = (from, to) => {
    const nodes = shown.slice(from, to).map((row, at) => {
      const canvas = picture(width, 1, () => {
        const [low, mid, high] = inks("low", "mid", "high");
        return (_, k) => [mid, row[k] < 0 ? low : high, Math.min(1, Math.abs(row[k]) / limit)];
      });
      canvas.dataset.row = from + at;
      const name = line(items[from + at]);
      return make("div", {}, name, canvas);
    });
    return make("div", { class: "strips" }, ...nodes);
  };
  const label = `Heat map of ${plural(shown.length, "embedding")}; the arrow keys read single numbers`;
  const box = make("div", { class: "heat", role: "group", tabindex: "0", "aria-label": label });
  box.append(strips(0, NUM_OPEN_STRIPS));
  const rest = shown.length - NUM_OPEN_STRIPS;
  if (rest > 0) box.append(folded(`${rest.toLocaleString("en")} more`, () => strips(NUM_OPEN_STRIPS)));
  const reading = make("output", { "aria-live": "polite" });
  readable(box, reading, shown.length, width, (row, column) => {
    return `${items[row].uri ? "image" : "text"} ${row + 1}, number ${column + 1} of ${width}: ${shown[row][column].toFixed(5)}`;
  });
  const end = limit.toFixed(3);
  const own = section("The vectors", box, legend(`−${end}`, `+${end}`, "two-way", reading));
  if (rows.length > shown.length) own.append(make("p", { class: "facts" }, `Shown: the first ${shown.length}.`));
  return own;
}
