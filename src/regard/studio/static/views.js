// One example for each kind of picture.

import { el } from "/page/dom.js";
import { shown } from "./shown.js";
import { say } from "./words.js";

// What is chosen at first: a row, and how it is drawn.
const EXAMPLES = {
  image: { locked: { row: 2, column: null } },
  sound: { locked: { row: 0, column: null } },
  sentiment: { locked: { row: 0, column: null }, view: "text" },
  reading: { locked: { row: 1, column: null }, view: "text" },
  scene: { locked: { row: 0, column: null } },
};

export async function open(place, kept) {
  const asked = location.hash.split("/")[2];
  const name = asked in EXAMPLES ? asked : "image";
  const picker = el("nav", { class: "picker", "aria-label": say("views") }, ...Object.keys(EXAMPLES).map((id) =>
    el("a", { href: `#/views/${id}`, "aria-current": id === name ? "true" : null }, el("strong", { text: say(id) }), el("small", { text: say(`${id}Help`) }))));
  const stage = el("div");
  place.append(el("div", { class: "intro" }, el("h1", { text: say("views") }), el("p", { text: say("viewsHelp") })), picker, stage);
  kept[name] ??= {};
  return shown(stage, name, kept[name], EXAMPLES[name]);
}
