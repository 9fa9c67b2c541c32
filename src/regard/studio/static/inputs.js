// Input fields, one for each input of a task: for text, for an image or a sound as a file, or for a scene as JSON.

import { el } from "/page/dom.js";
import { recorder } from "./recorder.js";
import { named, say } from "./words.js";

const MOST = 16; // largest size of a file in MB
const ACCEPT = { image: "image/*", sound: "audio/*,.wav,.flac" };

const DRAWN = 96; // a picture of at most this many pixels a side is enlarged without smoothing

// `values` receives the value of each field under its name: { text } or { data (base64), blob, title }. `ask` is called
// when the user presses Enter. The element's `paste(event)` puts an image from the clipboard into the first image
// field.
export function fields(inputs, values, ask) {
  const made = inputs.map((input) => (ACCEPT[input.kind] ? file(input, values) : text(input, values, ask)));
  const place = el("div", { class: "inputs" }, ...made);
  const images = made.filter((_, n) => inputs[n].kind === "image");
  place.paste = (event) => {
    const found = [...(event.clipboardData?.files ?? [])].find(({ type }) => type.startsWith("image/"));
    if (!found || !images.length) return;
    event.preventDefault();
    images[0].take(found, found.name || say("pasted"));
  };
  return place;
}

// Returns the value of an input field for a file: the file in base64, the file itself and its title.
export async function filled(blob, title) {
  return { data: await base64(blob), blob, title };
}

function text({ name, kind, label, long }, values, ask) {
  const lines = kind === "scene" ? 10 : long ? 7 : 2;
  const box = el("textarea", {
    rows: lines, maxlength: 100000, spellcheck: "false", "data-input": name, class: kind === "scene" ? "code" : null,
    placeholder: kind === "scene" ? "{ … }" : null,
    oninput: () => { values[name] = { text: box.value }; },
    onkeydown: (event) => {
      const asks = event.key === "Enter" && !event.isComposing && (event.ctrlKey || event.metaKey || (lines === 2 && !event.shiftKey));
      if (!asks) return;
      event.preventDefault();
      ask();
    },
    ondragover: (event) => event.preventDefault(),
    ondrop: async (event) => {
      const [dropped] = event.dataTransfer.files;
      if (!dropped) return; // the browser inserts dragged text at the position of the drop
      event.preventDefault();
      box.value = (await dropped.text()).slice(0, 100000);
      values[name] = { text: box.value };
    },
  });
  box.value = values[name]?.text ?? "";
  return el("label", { class: "field" }, el("span", { text: named(label) }), box);
}

function file({ name, kind, label }, values) {
  const failure = el("p", { class: "failure", role: "alert" });
  const seen = el("div", { class: "seen" });
  let address = null;

  const draw = () => {
    if (address) URL.revokeObjectURL(address);
    address = null;
    const value = values[name];
    if (!value?.blob) return seen.replaceChildren();
    address = URL.createObjectURL(value.blob);
    const shown = kind === "image" ? preview(address, value.title) : el("audio", { controls: true, src: address, "aria-label": value.title });
    seen.replaceChildren(shown, el("span", { class: "small", text: value.title }));
  };
  const take = async (blob, title) => {
    if (!blob) return;
    failure.textContent = "";
    const size = Math.ceil(blob.size / 2 ** 20);
    if (size > MOST) {
      failure.textContent = say("error", { reason: say("fileTooLarge", { size, most: MOST }) });
      return;
    }
    values[name] = await filled(blob, title);
    draw();
  };
  const opener = el("label", {
    class: "opener",
    ondragover: (event) => { event.preventDefault(); opener.classList.add("over"); },
    ondragleave: () => opener.classList.remove("over"),
    ondrop: (event) => {
      event.preventDefault();
      opener.classList.remove("over");
      const [dropped] = event.dataTransfer.files;
      if (dropped) take(dropped, dropped.name);
    },
  }, el("input", { type: "file", accept: ACCEPT[kind], "data-input": name, onchange: (event) => take(event.target.files[0], event.target.files[0]?.name) }),
  el("strong", { text: say(kind === "image" ? "chooseImage" : "chooseSound") }), say(kind === "image" ? "dropOrPaste" : "drop"));
  const microphone = kind === "sound" ? recorder((blob) => take(blob, say("recording")), (reason) => { failure.textContent = say("error", { reason }); }) : null;
  draw();
  const place = el("div", { class: "field upload", role: "group", "aria-label": named(label) }, el("span", { text: named(label) }), el("div", { class: "row" }, opener, microphone ?? "", seen), failure);
  place.take = take;
  return place;
}

// Shows the chosen image. If the browser cannot display its format, only its name is shown: the run may still support
// the format.
function preview(address, title) {
  const image = el("img", {
    src: address, alt: title,
    onload: () => image.classList.toggle("drawn", Math.max(image.naturalWidth, image.naturalHeight) <= DRAWN),
    onerror: () => image.remove(),
  });
  return image;
}

function base64(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}
