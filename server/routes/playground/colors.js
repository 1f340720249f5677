// Numbers as colours: a matrix as a table, or as a picture if it is large; vectors as strips.

const MAX_CELLS = 4096;

// Returns the [red, green, blue] of named theme colours.
const inks = (...names) => names.map((name) => {
  return getComputedStyle(document.querySelector(`#inks .${name}`)).color.match(/[\d.]+/g).map(Number);
});

function paint(root) {
  for (const canvas of root.querySelectorAll("canvas")) canvas.paint?.();
}

function picture(width, height, colour) {
  const canvas = make("canvas", { width, height, "aria-hidden": "true" });
  canvas.paint = () => {
    const context = canvas.getContext("2d"), image = context.createImageData(width, height), own = colour();
    for (let i = 0, at = 0; i < height; i++) {
      for (let k = 0; k < width; k++, at += 4) {
        const [from, to, share] = own(i, k);
        for (let c = 0; c < 3; c++) image.data[at + c] = from[c] + (to[c] - from[c]) * share;
        image.data[at + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
  };
  return canvas;
}

// Shows the value under the pointer, or at a position moved by the arrow keys, in a live region.
function readable(box, reading, numRows, numColumns, tell) {
  let place = [0, -1];
  const read = (row, column) => {
    place = [Math.max(0, Math.min(numRows - 1, row)), Math.max(0, Math.min(numColumns - 1, column))];
    reading.textContent = tell(...place);
  };
  box.addEventListener("pointermove", (event) => {
    const canvas = event.target.closest("canvas");
    if (!canvas) return;
    const frame = canvas.getBoundingClientRect();
    const row = Number(canvas.dataset.row ?? Math.floor(((event.clientY - frame.top) / frame.height) * canvas.height));
    read(row, Math.floor(((event.clientX - frame.left) / frame.width) * numColumns));
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    read(place[0] + step[0], place[1] + step[1]);
  });
}

function legend(from, to, kind, ...more) {
  const scale = make("span", { class: `scale ${kind}`, "aria-hidden": "true" });
  return make("div", { class: "legend" }, from, scale, to, ...more);
}

// A matrix. Colours span the shown values. NaN is left blank, for example the similarity of a text with itself.
function matrix({ label, corner, rows, columns, value, digits = 2 }) {
  const values = new Float64Array(rows.length * columns.length);
  let low = Infinity, high = -Infinity;
  for (let i = 0, at = 0; i < rows.length; i++) {
    for (let k = 0; k < columns.length; k++, at++) {
      const own = values[at] = value(i, k);
      if (own < low) low = own;
      if (own > high) high = own;
    }
  }
  const of = (i, k) => values[i * columns.length + k];
  const share = (own) => (high > low ? (own - low) / (high - low) : 0.5);
  const isTable = values.length <= MAX_CELLS;
  const body = isTable ? table(label, corner, rows, columns, of, share, digits) : map(rows, columns, of, share);
  const attributes = { class: "scroll", role: "group", tabindex: "0", "aria-label": label };
  const box = make("div", attributes, body);
  const reading = make("output", { "aria-live": "polite" });
  if (!isTable) {
    box.setAttribute("aria-label", `${label}; the arrow keys read single values`);
    readable(box, reading, rows.length, columns.length, (i, k) => {
      const own = of(i, k), shown = Number.isNaN(own) ? "left out" : own.toFixed(digits);
      return `${rows[i].name} with ${columns[k].name}: ${shown}`;
    });
  }
  const ends = low <= high ? [low, high].map((end) => end.toFixed(digits)) : ["–", "–"];
  return make("div", { class: "matrix" }, box, legend(...ends, "one-way", reading));
}

function table(label, corner, rows, columns, of, share, digits) {
  const heads = columns.map((own) => make("th", { scope: "col", title: own.text }, ...thumb(own), own.name));
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, corner), ...heads));
  const body = make("tbody");
  rows.forEach((row, i) => {
    const { name, text } = row, title = text === name ? name : `${name} ${text}`;
    const line = make("span", { class: "one-line", dir: "auto" }, ...thumb(row), title);
    const cells = columns.map((_, k) => {
      const own = of(i, k);
      if (Number.isNaN(own)) return make("td", { class: "left-out" });
      const cell = make("td", {}, own.toFixed(digits));
      cell.style.setProperty("--share", share(own).toFixed(3));
      return cell;
    });
    body.append(make("tr", {}, make("th", { scope: "row", title: text }, line), ...cells));
  });
  return make("table", { "aria-label": label }, head, body);
}

function map(rows, columns, of, share) {
  const canvas = picture(columns.length, rows.length, () => {
    const [none, full] = inks("none", "full");
    return (i, k) => [none, full, share(of(i, k)) || 0];
  });
  canvas.className = "map";
  canvas.style.width = `${columns.length * 8}px`;
  canvas.style.height = `${rows.length * 8}px`;
  return canvas;
}
