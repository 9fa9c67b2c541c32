// Texts about a head: its shape, the result of its check, its storage error, and the values under the pointer.

import { el } from "./dom.js";
import { compact, known, labelOf, short, weight } from "./format.js";
import { best, valueAt } from "./model.js";
import { heard } from "./sound.js";

// largest relative error that half precision explains; a larger error means that the weights are wrong
const GOOD = 0.05;

// The title of the displayed map: the name of the layer and, if the layer has several heads, which of them are shown.
// The head after the last is the mean of all heads.
export function titleOf(name, record, heads, say) {
  const which = headsOf(record, heads, say);
  return [
    el("span", { class: "module", text: name, title: record.name }),
    which ? el("span", { class: "which", text: ` · ${which}` }) : "",
  ];
}

export function headsOf(record, heads, say) {
  if (record.heads === 1) return "";
  if (heads.length > 1) return say("several", { heads: ranges(heads) });
  return heads[0] === record.heads ? say("meanOf", { count: record.heads }) : say("head", { head: heads[0] });
}

// Numbers in ascending order; consecutive numbers are written as a range: "0–3, 7".
function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  const written = ([low, high]) => (high - low > 1 ? `${low}–${high}` : low === high ? String(low) : `${low}, ${high}`);
  return found.map(written).join(", ");
}

export function checkOf(record, say) {
  const checked = record.check !== null && record.check !== undefined;
  return checked ? say("check", { value: compact(record.check) }) : say("noCheck");
}

export function factsOf(record, head, name, say) {
  const checked = record.check !== null && record.check !== undefined;
  const state = checked ? (record.check < GOOD ? "check good" : "check bad") : "check";
  const measured = (name) => (known(record[name]?.[head]) ? [`${say(name)} ${compact(record[name][head])}`] : []);
  const facts = [
    say("size", { queries: record.queries, keys: record.keys }),
    ...measured("entropy"), ...measured("distance"),
    ...(record.scale ? [say("scaleIs", { value: compact(record.scale) })] : []),
    ...(record.kind === "rollout" ? [] : [say("kindIs", { value: record.kind })]),
  ];
  const check = el("span", { class: state, text: checkOf(record, say), title: say(checked ? "checkHelp" : "noCheckHelp") });
  return [
    record.kind === "rollout" ? "" : check,
    ...facts.map((text) => el("span", { text })),
    record.name && record.name !== name ? el("code", { class: "path", text: record.name }) : "",
  ];
}

// Sentences about the stored weights: their largest error, and what the cells of a pooled map show.
export function storedOf({ record, map, whole }, finer, say) {
  const sizes = {
    queries: record.queries, keys: record.keys, kept: record.pack?.kept,
    rows: compact(map.rowBlock), columns: compact(map.columnBlock),
  };
  if (finer) return whole ? [] : [say("pooledTiles", sizes)];
  if (!whole) return [say("pooled", sizes), ...(record.pack.stride > 1 ? [say("stride", record.pack)] : [])];
  const error = compact(map.error);
  // largest rounding error of weights that are stored in 16 bits: half of the step between two 16-bit values
  const fine = compact(record.pack.peak / 131070);
  if (record.pack.half || record.pack.kept >= record.keys || fine === error) return [say("within", { error })];
  return [say("precision", { error, kept: record.pack.kept, fine })];
}

// The text about the cell or token at a position of the picture: its names, its weight and the error of the weight.
export function readoutOf(model, { row, column }, view, say) {
  const name = (labels, n) => short(labelOf(labels, n), 32);
  const parts = [];
  if (row !== null && column !== null) {
    const { value, error, mean } = valueAt(model, row, column);
    const number = weight(value, error);
    parts.push(el("span", { text: say("arrow", { row: name(model.rows, row), column: name(model.columns, column) }) }));
    parts.push(el("strong", { class: "number", text: mean || model.parts ? say("mean", { value: number }) : number }));
    const each = model.parts ? model.partsOf(row) : null;
    if (each) parts.push(el("span", { class: "number", text: model.parts.map(({ head }, n) => `${head}: ${each[n][column].toFixed(2)}`).join("  ") }));
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
  // In the road view each row of the map has its own scene; the speeds of all scenes are in one list, row after row.
  const at = view === "road" ? (row ?? 0) * model.columns.items.length + column : column;
  const speed = ["scene", "road"].includes(view) && column !== null ? model.columns.speed?.[at] : undefined;
  if (speed !== undefined) parts.push(el("span", { class: "number", text: say("speedOf", { value: compact(speed) }) }));
  return parts;
}
