// The section "views" of the studio: the attention of each run for the run's own example, and an example trace for each
// kind of drawing.

import { el } from "/page/dom.js";
import { json } from "./server.js";
import { shown } from "./shown.js";
import { say } from "./words.js";

// The initial selection of each example trace: a selected (locked) row of the map and, for some examples, the kind of
// drawing.
const EXAMPLES = {
  image: { locked: { row: 2, column: null } },
  sound: { locked: { row: 0, column: null } },
  sentiment: { locked: { row: 0, column: null }, view: "text" },
  reading: { locked: { row: 1, column: null }, view: "text" },
  scene: { locked: { row: 0, column: null } },
};

export async function open(place, kept) {
  const runs = (await json("/api/traces")).traces.filter(({ origin }) => origin === "run");
  const asked = location.hash.split("/")[2];
  const known = [...runs.map(({ id }) => id), ...Object.keys(EXAMPLES)];
  const name = known.includes(asked) ? asked : known[0];
  const entry = (id, title, help) =>
    el("a", { href: `#/views/${id}`, "aria-current": id === name ? "true" : null }, el("strong", { text: title }), el("small", { text: help }));
  const picker = (label, entries) => el("nav", { class: "picker", "aria-label": label }, ...entries);
  const stage = el("div");
  place.append(
    el("div", { class: "intro" }, el("h1", { text: say("views") }), el("p", { text: say("viewsHelp") })),
    runs.length ? el("h2", { text: say("viewsOfRuns") }) : "",
    runs.length ? picker(say("viewsOfRuns"), runs.map(({ id, title }) => entry(id, title, say("viewOfRun")))) : "",
    el("h2", { text: say("demonstrations") }),
    picker(say("demonstrations"), Object.keys(EXAMPLES).map((id) => entry(id, say(id), say(`${id}Help`)))),
    stage,
  );
  kept[name] ??= {};
  return shown(stage, name, kept[name], EXAMPLES[name] ?? null);
}
