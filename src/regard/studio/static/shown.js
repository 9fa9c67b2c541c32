// The viewer of a trace inside the studio, with an evaluation of the attention's faithfulness below it.

import { mount } from "/page/viewer.js";
import { el } from "/page/dom.js";
import { labelOf } from "/page/format.js";
import { charts, without } from "./chart.js";
import { StudioSource } from "./source.js";
import { theme } from "./cells.js";
import { language, say } from "./words.js";

const LONG = 512; // above this number of tokens, weights are too small for a linear colour scale
const KEPT = ["sequence", "record", "head", "several", "heads", "shared", "words", "view", "scale", "cells", "zoom", "locked"];

// Fills the element `place` with the viewer of one trace, or of two to compare. `kept` stores the selection and `first`
// is the initial selection. With `judged`, the faithfulness of the chosen row is shown below the viewer.
export async function shown(place, id, kept, first = null, beside = null, judged = true) {
  const holder = el("div", { class: "holder" });
  const below = el("div", { "aria-live": "polite" });
  place.replaceChildren(el("p", { class: "quiet", text: say("opening") }));
  const source = await StudioSource.open(id);
  const sources = beside ? [source, await StudioSource.open(beside)] : [source];
  place.replaceChildren(holder, below);
  const viewer = mount(holder, sources, { language: language(), theme: theme(), header: false });
  const { state } = viewer;
  if (kept.values) state.set(kept.values);
  else if (first) state.set(first);
  else if (source.about.records.some(({ queries, keys }) => Math.max(queries, keys) > LONG)) state.set({ scale: "root" });
  let last = "";
  if (!judged) {
    return state.on(() => {
      kept.values = Object.fromEntries(KEPT.map((name) => [name, state.get(name)]));
    });
  }
  const judge = async () => {
    const record = state.get("record");
    const entry = source.about.records[record];
    const head = Math.min(state.get("head") === "mean" ? 0 : state.get("head"), entry.heads - 1);
    const row = Math.min(state.get("locked")?.row ?? 0, entry.queries - 1);
    const now = `${record}/${head}/${row}`;
    if (now === last) return;
    last = now;
    if (!entry.model) return below.replaceChildren(without());
    try {
      const found = await source.faithfulness(record, head, row);
      if (now === last) below.replaceChildren(charts(found, say("faithfulFor", { row: labelOf(source.about.labels[entry.rows], row), head })));
    } catch (error) {
      if (now === last) below.replaceChildren(el("p", { class: "failure", text: say("error", { reason: error.message }) }));
    }
  };
  const stop = state.on((changed) => {
    kept.values = Object.fromEntries(KEPT.map((name) => [name, state.get(name)]));
    if (["record", "head", "locked"].some((name) => changed.has(name))) judge();
  });
  if (source.about.records.length) judge();
  return stop;
}
