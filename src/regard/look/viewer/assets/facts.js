// What is said about a head in words: its shape and check, what storing it cost, and what is under the pointer.

import { el } from "./dom.js";
import { compact, known, labelOf, short, weight } from "./format.js";
import { best, valueAt } from "./model.js";
import { heard } from "./sound.js";

const GOOD = 0.05; // a relative error that half precision explains; more means that the weights are others

export function titleOf(record, head, say) {
  return [
    el("span", { class: "module", text: record.name || "·" }),
    record.call ? el("span", { class: "quiet", text: ` #${record.call + 1}` }) : "",
    el("span", { class: "which", text: ` · ${say("head", { head: head + 1 })}` }),
  ];
}

export function checkOf(record, say) {
  const checked = record.check !== null && record.check !== undefined;
  return checked ? say("check", { value: compact(record.check) }) : say("noCheck");
}

export function factsOf(record, head, say) {
  const checked = record.check !== null && record.check !== undefined;
  const state = checked ? (record.check < GOOD ? "check good" : "check bad") : "check";
  const measured = (name) => (known(record[name]?.[head]) ? [`${say(name)} ${compact(record[name][head])}`] : []);
  const facts = [
    say("size", { queries: record.queries, keys: record.keys }),
    ...measured("entropy"), ...measured("distance"),
    ...(record.scale ? [say("scaleIs", { value: compact(record.scale) })] : []),
    say("kindIs", { value: record.kind }),
  ];
  return [
    el("span", { class: state, text: checkOf(record, say), title: say(checked ? "checkHelp" : "noCheckHelp") }),
    ...facts.map((text) => el("span", { text })),
  ];
}

// What keeping a map in a page cost; what a pooled map shows.
export function storedOf({ record, map, whole }, finer, say) {
  const sizes = {
    queries: record.queries, keys: record.keys, kept: record.pack?.kept,
    rows: compact(map.rowBlock), columns: compact(map.columnBlock),
  };
  if (finer) return whole ? [] : [say("pooledTiles", sizes)];
  if (!whole) return [say("pooled", sizes), ...(record.pack.stride > 1 ? [say("stride", record.pack)] : [])];
  if (record.pack.half) return [say("within", { error: compact(map.error) })];
  const fine = compact(record.pack.peak / 131070); // half a step of 16 bits
  return [say("precision", { error: compact(map.error), kept: record.pack.kept, fine })];
}

// One sentence on a place of the picture.
export function readoutOf(model, { row, column }, view, say) {
  const name = (labels, n) => short(labelOf(labels, n), 32);
  const parts = [];
  if (row !== null && column !== null) {
    const { value, error, mean } = valueAt(model, row, column);
    const number = weight(value, error);
    parts.push(el("span", { text: say("arrow", { row: name(model.rows, row), column: name(model.columns, column) }) }));
    parts.push(el("strong", { class: "number", text: mean ? say("mean", { value: number }) : number }));
  } else if (row !== null) {
    const weights = model.weights(row);
    const most = best(weights);
    const found = weights ? `${name(model.columns, most)} ${weight(weights[most], model.map.error)}` : "…";
    parts.push(el("span", { text: `“${name(model.rows, row)}” ${say("looksAt")}` }), el("strong", { text: found }));
  } else {
    const value = weight(model.received[column], 0.0004);
    parts.push(el("span", { text: say("receivedBy", { column: name(model.columns, column), value }) }));
  }
  const weights = view === "sound" && row !== null && model.columns.seconds ? model.weights(row) : null;
  if (weights) {
    const { from, to } = heard(weights, model.columns.seconds);
    parts.push(el("span", { class: "number", text: say("seconds", { from: from.toFixed(2), to: to.toFixed(2) }) }));
  }
  // On a road every row has numbers of its own, unless there is one row alone.
  const at = view === "road" ? (row ?? 0) * model.columns.items.length + column : column;
  const speed = ["scene", "road"].includes(view) && column !== null ? model.columns.speed?.[at] : undefined;
  if (speed !== undefined) parts.push(el("span", { class: "number", text: say("speedOf", { value: compact(speed) }) }));
  return parts;
}
