// Functions that combine the maps of several heads of one layer, each of which is shown in its own hue.

import { MOST_HEADS, mostOf } from "./colors.js";

// The index of the hue of each chosen head: the head's number, or its position among the chosen heads if the layer has
// more heads than there are hues.
export function huesOf(heads, count) {
  return heads.map((head, place) => (count <= MOST_HEADS ? head : place) % MOST_HEADS);
}

// The mean of the attention maps of several heads.
export function meanMap(maps) {
  const [first] = maps;
  const values = new Float32Array(first.values.length);
  for (const { values: own } of maps) own.forEach((value, n) => (values[n] += value / maps.length));
  return { ...first, values, highest: mostOf(values), error: Math.max(...maps.map(({ error }) => error)) };
}

export function meanOf(lists) {
  return Float32Array.from(lists[0], (_, n) => lists.reduce((sum, list) => sum + list[n], 0) / lists.length);
}

// The mean of one row over several heads; `parts` has the weights of each head.
export function meanRow(rows, keys) {
  const dense = rows.map((row) => {
    if (!row.indices) return row.values;
    const values = new Float32Array(keys);
    row.indices.forEach((index, n) => (values[index] = row.values[n]));
    return values;
  });
  const rest = rows.reduce((sum, row) => sum + row.rest, 0) / rows.length;
  return { row: rows[0].row, indices: null, values: meanOf(dense), parts: dense, rest, error: Math.max(...rows.map(({ error }) => error)) };
}

// A map that has in each cell the largest |weight| of any head, and the index of that head.
export function strongestMap(parts) {
  const [{ map }] = parts;
  const values = new Float32Array(map.values.length);
  const owner = new Uint8Array(map.values.length);
  values.forEach((_, n) => {
    const place = parts.reduce((best, part, at) => (Math.abs(part.map.values[n]) > Math.abs(parts[best].map.values[n]) ? at : best), 0);
    values[n] = parts[place].map.values[n];
    owner[n] = parts[place].hue;
  });
  return { ...map, values, owner, highest: mostOf(values) };
}
