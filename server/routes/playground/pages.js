// The similarity of a query token to the patches of a page, drawn on the page.

const MAX_OPACITY = 200, EVERY_TOKEN = "All tokens";

// Returns the similarities [R * C] of one query token, or their mean over all tokens, and the range of all of them.
function patchScores(cosines, { vectors }, token) {
  const rows = token === undefined ? cosines : [cosines[token]];
  const values = vectors.map((at) => rows.reduce((sum, row) => sum + row[at], 0) / rows.length);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return { values, low, high };
}

// Returns the index of the query token that distinguishes the patches best.
function sharpest(cosines, patches) {
  const spread = cosines.map((_, token) => {
    const { low, high } = patchScores(cosines, patches, token);
    return high - low;
  });
  return spread.indexOf(spread.reduce((a, b) => Math.max(a, b), 0));
}

function pageMap(item, query, cosines, patches) {
  const { rows, columns } = patches;
  const canvas = make("canvas", { width: columns, height: rows, "aria-hidden": "true" });
  const page = make("div", { class: "page", role: "group", tabindex: "0" }, make("img", { src: item.uri, alt: "" }), canvas);
  const reading = make("output"), scale = make("div", { class: "legend" });
  let shown = {};
  canvas.paint = () => {
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows), [colour] = inks("high");
    const { values, low, high } = shown;
    values.forEach((value, i) => {
      const opacity = high > low ? (MAX_OPACITY * (value - low)) / (high - low) : 0;
      image.data.set([...colour.slice(0, 3), opacity], 4 * i);
    });
    context.putImageData(image, 0, 0);
  };
  const show = (token) => {
    shown = patchScores(cosines, patches, token);
    const name = token === undefined ? EVERY_TOKEN : query[token];
    page.setAttribute("aria-label", `Similarity of ${name} to each part of ${item.name}; read it with the arrow keys`);
    scale.replaceChildren(shown.low.toFixed(2), make("span", { class: "scale on-page", "aria-hidden": "true" }),
      shown.high.toFixed(2), reading);
    reading.textContent = "";
    canvas.paint();
  };
  const chips = [EVERY_TOKEN, ...query].map((name, i) => {
    const chip = make("button", { type: "button", class: "quiet", "aria-pressed": "false" }, name);
    chip.addEventListener("click", () => press(i));
    return chip;
  });
  const press = (at) => {
    chips.forEach((chip, i) => chip.setAttribute("aria-pressed", i === at));
    show(at ? at - 1 : undefined);
  };
  readable(page, reading, rows, columns, (row, column) => {
    return `row ${row + 1}, column ${column + 1}: ${shown.values[row * columns + column].toFixed(4)}`;
  });
  press(1 + sharpest(cosines, patches));
  const tokens = make("div", { class: "chips", role: "group", "aria-label": "Query token on the page" }, ...chips);
  return make("div", { class: "on-pages" }, tokens, page, scale);
}

// Names the tokens of a page by the place of their patch.
function patchNames(names, { columns, vectors }) {
  const own = [...names];
  vectors.forEach((at, i) => { own[at] = `row ${Math.floor(i / columns) + 1}, column ${(i % columns) + 1}`; });
  return own;
}
