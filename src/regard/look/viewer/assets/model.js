// The data of one head for drawing: its map, its labels, and its rows, some of which may still be loading.

import { mostOf } from "./colors.js";
import { strongestMap } from "./several.js";

// `ask(row)` fetches a row of a pooled map; `arrived()` is called when the row has arrived, `failed(error)` if fetching
// failed. `parts` are the maps of several heads, whose mean is `map`; null if one head is shown.
export function modelOf({ record, map, received, rows, columns, picture, sheet, parts = null }, { ask, arrived, failed }) {
  const whole = map.rowBlock === 1 && map.columnBlock === 1;
  const known = new Map();
  const rowOf = (row) => {
    if (whole) {
      const values = map.values.subarray(row * map.columns, (row + 1) * map.columns);
      return { row, indices: null, values, rest: 0, error: map.error };
    }
    if (!known.has(row)) {
      known.set(row, null);
      ask(row).then((found) => {
        if (!found) return known.delete(row); // the request for the row was cancelled before it was sent
        known.set(row, found);
        return arrived();
      }, (error) => {
        known.delete(row);
        failed(error);
      });
    }
    return known.get(row);
  };
  const weights = (row) => {
    const found = rowOf(row);
    if (!found?.indices) return found?.values ?? null;
    const values = new Float32Array(record.keys);
    found.indices.forEach((index, n) => (values[index] = found.values[n]));
    return values;
  };
  // The weights of one row, for each of several heads; null while the row is loading.
  const partsOf = (row) => {
    if (!whole) return rowOf(row)?.parts ?? null;
    return parts.map((part) => part.map.values.subarray(row * map.columns, (row + 1) * map.columns));
  };
  const strongest = parts ? strongestMap(parts) : null;
  const names = (labels) => labels?.items.join("\u0000");
  return {
    record, map, received, rows, columns, picture, sheet, whole, rowOf, weights, tile: null, parts, partsOf, strongest,
    highest: strongest?.highest ?? map.highest,
    mostReceived: Math.max(1e-12, ...(parts ? parts.map((part) => mostOf(part.received)) : [mostOf(received)])),
    // True if the map has negative weights, which are drawn in a second hue.
    negative: map.values.some((value) => value < 0),
    odd: map.values.some((value) => !Number.isFinite(value)), // true if the map has NaN or infinite weights
    // True if the queries and the keys of the map are the same tokens.
    same: record.queries === record.keys && names(rows) === names(columns),
  };
}

// The weight of a cell and its storage error: from a tile, the whole map or the largest weights of a row. `mean` is
// true if only the mean of several weights, in which the cell is pooled, is known.
export function valueAt(model, row, column) {
  const { map, tile } = model;
  if (tile?.rowBlock === 1 && tile.columnBlock === 1 && inside(tile, row, column)) {
    const value = tile.values[(row - tile.row0) * tile.columns + column - tile.column0];
    return { value, error: tile.error, mean: false };
  }
  if (model.whole) return { value: map.values[row * map.columns + column], error: map.error, mean: false };
  const kept = model.rowOf(row);
  const found = kept?.row === row ? (kept.indices ? kept.indices.indexOf(column) : column) : -1;
  if (found >= 0) return { value: kept.values[found], error: kept.error, mean: false };
  const cell = Math.floor(row / map.rowBlock + 1e-9) * map.columns + Math.floor(column / map.columnBlock + 1e-9);
  return { value: map.values[cell], error: map.error, mean: true };
}

export function inside(grid, row, column) {
  const [down, right] = [row - grid.row0, column - grid.column0];
  return down >= 0 && down < grid.rows * grid.rowBlock && right >= 0 && right < grid.columns * grid.columnBlock;
}

// The index of the largest weight, or of the first non-finite weight if there is one.
export function best(weights) {
  const strange = weights?.findIndex((value) => !Number.isFinite(value)) ?? -1;
  if (strange >= 0) return strange;
  let place = 0;
  weights?.forEach((value, n) => value > weights[place] && (place = n));
  return place;
}
