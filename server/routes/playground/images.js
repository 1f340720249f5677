// Images beside texts: chosen, dropped or pasted files. An item is a text, or an image with a name and a data URI.

const THUMB_PIXELS = 192, SHOWN_URI_CHARS = 64;
const WITH_IMAGES = ["embed", "rerank", "multi"];
const pictures = {};  // Task to its images.

const readsImages = () => facts().modalities.includes("image");
const takesImages = (task) => readsImages() && (task !== "multi" || facts().outputs.includes("multi_vector"));
const imagesOf = (task) => (takesImages(task) ? pictures[task] ?? [] : []);
const textOf = (item) => item.name ?? item;
const asInput = (item) => (item.uri ? { image: item.uri } : item);

// Returns the texts of a field and the images of its task.
const itemsOf = (task, id) => [...texts(id), ...imagesOf(task)];

function counts(items) {
  const count = items.filter((item) => item.uri).length, rest = items.length - count;
  return [...(rest || !count ? [plural(rest, "text")] : []), ...(count ? [plural(count, "image")] : [])];
}

function thumb(item) {
  return item.thumb ? [make("img", { class: "thumb", src: item.thumb, alt: "" })] : [];
}

// A replacer of JSON.stringify for shown commands: a data URI would fill the page.
function shortened(_, value) {
  if (typeof value !== "string" || !value.startsWith("data:image/") || value.length < SHOWN_URI_CHARS) return value;
  const item = Object.values(pictures).flat().find(({ uri }) => uri === value);
  return `${value.slice(0, value.indexOf(",") + 1)}<base64 of ${item?.name ?? "the image"}>`;
}

function asDataUri(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => fail(reader.error));
    reader.readAsDataURL(file);
  });
}

// Returns a small copy for the page; undefined if the browser cannot read the format, which the server may.
async function asThumb(file) {
  let bitmap;
  try { bitmap = await createImageBitmap(file); } catch { return undefined; }
  const scale = Math.min(1, THUMB_PIXELS / Math.max(bitmap.width, bitmap.height));
  const width = Math.max(1, Math.round(bitmap.width * scale)), height = Math.max(1, Math.round(bitmap.height * scale));
  const canvas = make("canvas", { width, height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return canvas.toDataURL();
}

async function addImages(task, files) {
  const box = document.querySelector(`#${task} .images`);
  box.querySelectorAll(".error").forEach((node) => node.remove());
  const found = [...files].filter((file) => file.type.startsWith("image/"));
  const added = found.map(async (file) => {
    return { name: file.name, uri: await asDataUri(file), thumb: await asThumb(file) };
  });
  const results = await Promise.allSettled(added);  // Other images may be added or removed meanwhile.
  pictures[task] = [...(pictures[task] ?? []), ...results.flatMap(({ value }) => value ?? [])];
  showImages(task);
  const lost = found.filter((_, i) => results[i].status === "rejected").map(({ name }) => name);
  if (lost.length) box.append(complaint("Not added", `The browser cannot read ${lost.join(", ")}.`));
}

function showImages(task) {
  const box = document.querySelector(`#${task} .images`);
  box.hidden = !takesImages(task);
  box.querySelector(".thumbs").replaceChildren(...imagesOf(task).map((item) => {
    const remove = make("button", { type: "button", class: "quiet", "aria-label": `Remove ${item.name}` }, "×");
    remove.addEventListener("click", () => {
      pictures[task] = pictures[task].filter((other) => other !== item);
      showImages(task);
      box.querySelector("input").focus();
    });
    return make("li", { title: item.name }, ...thumb(item), make("span", { class: "one-line" }, item.name), remove);
  }));
  document.querySelector(`#${task} textarea`).required = !imagesOf(task).length;
}

function acceptImages(box) {
  const form = box.closest("form"), task = form.parentElement.id, input = box.querySelector("input");
  input.addEventListener("change", async () => {
    await addImages(task, input.files);
    input.value = "";  // The same file may be chosen again.
  });
  form.addEventListener("paste", (event) => { if (takesImages(task)) addImages(task, event.clipboardData.files); });
  form.addEventListener("dragover", (event) => {
    if (!takesImages(task) || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    box.classList.add("over");
  });
  form.addEventListener("dragleave", () => box.classList.remove("over"));
  form.addEventListener("drop", (event) => {
    box.classList.remove("over");
    if (!takesImages(task) || !event.dataTransfer.files.length) return;
    event.preventDefault();
    addImages(task, event.dataTransfer.files);
  });
}
