// The view of a map as cells: rows are queries, columns are keys, and darker cells have larger weights.

import { colorOf, headColor, headInk, headTable, inkOf, mostOf, palette, stretch, table } from "./colors.js";
import { compact, labelOf, nice, odd, short, textWidth } from "./format.js";
import { inside } from "./model.js";
import { pixels } from "./painter.js";

const SIZE = 12; // font size of the labels in pixels
const LONGEST = 140; // largest width of a label in pixels
const READABLE = 34; // smallest cell in pixels that shows a number
// cache of drawn attention maps: the cells of a map as a picture, for each colour scale and theme
const painted = new WeakMap();

export const heatmap = {
  name: "heatmap",
  keys: "grid",
  zooms: true,
  fits: () => true,
  layout,
};

function layout(model, look) {
  const { record } = model;
  const most = Math.max(60, Math.min(LONGEST, look.width * 0.24)); // largest width of a label in pixels
  const left = 14 + Math.min(most, longest(model.rows, record.queries));
  const widest = Math.min(most, longest(model.columns, record.keys));
  const after = Math.max(12, ...overhang(model.columns, record.keys, widest, look.width - left));
  const room = Math.max(80, look.width - left - after);
  // A map that nearly fits the window is shrunk to fit it, as long as its numbers stay readable.
  const whole = (Math.max(384, 0.78 * innerHeight) - 20 - widest * Math.SQRT1_2) / Math.max(1, record.queries);
  const fit = Math.min(record.keys <= 8 ? 64 : 44, room / Math.max(1, record.keys), whole >= READABLE ? whole : Infinity);
  const cell = Math.min(64, fit * look.zoom);
  const high = Math.min(64, Math.max(cell, Math.min(26, (160 / Math.max(1, record.queries)) * look.zoom)));
  const slanted = widest > cell - 6;
  const top = slanted ? 14 + widest * Math.SQRT1_2 : 24;
  const place = { left, top, cell, high, slanted, most };
  return {
    width: left + cell * record.keys + (slanted ? after : 12),
    height: top + high * record.queries + 4,
    deepest: look.highest,
    held: true,
    wanted: (box) => span(place, record, box),
    draw: (painter, box) => draw(painter, box, place, model, look),
    hit: (x, y, box) => hit(x, y, box, place, record),
    at: (row, column) => ({ x: left + cell * (column + 0.5), y: top + high * (row + 0.5), left, top }),
  };
}

// How far the slanted labels of the last columns extend beyond the right edge of the map, in pixels.
function overhang(labels, count, widest, width) {
  const cell = Math.max(1, Math.min(44, (width - widest * Math.SQRT1_2) / Math.max(1, count)));
  if (widest <= cell - 6) return [];
  const last = Math.min(count, Math.ceil((widest * Math.SQRT1_2) / cell) + 1);
  return Array.from({ length: last }, (_, n) => {
    const name = Math.min(widest, textWidth(short(labelOf(labels, count - 1 - n)), SIZE));
    return (name + SIZE) * Math.SQRT1_2 - cell * (n + 0.5);
  });
}

function longest(labels, count) {
  let widest = 0;
  const step = Math.max(1, Math.floor(count / 600)); // in a very long list only some labels are measured, to save time
  for (let n = 0; n < count; n += step) widest = Math.max(widest, textWidth(short(labelOf(labels, n)), SIZE));
  return Math.ceil(widest);
}

// The range of rows and columns of the map that are visible in a box of the picture.
function span(place, record, box) {
  const row0 = Math.max(0, Math.floor(box.y / place.high));
  const column0 = Math.max(0, Math.floor(box.x / place.cell));
  const rows = Math.min(record.queries, Math.ceil((box.y + box.height - place.top) / place.high)) - row0;
  const columns = Math.min(record.keys, Math.ceil((box.x + box.width - place.left) / place.cell)) - column0;
  return { row0, column0, rows: Math.max(0, rows), columns: Math.max(0, columns) };
}

function hit(x, y, box, place, record) {
  if (y < box.y + place.top && x < box.x + place.left) return null;
  const row = y < box.y + place.top ? null : Math.floor((y - place.top) / place.high);
  const column = x < box.x + place.left ? null : Math.floor((x - place.left) / place.cell);
  const outside = (place, count) => place !== null && (place < 0 || place >= count);
  return outside(row, record.queries) || outside(column, record.keys) ? null : { row, column };
}

function draw(painter, box, place, model, look) {
  const { colors } = look;
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  const [x, y] = [box.x + place.left, box.y + place.top];
  const seen = span(place, model.record, box);
  painter.clip(x, y, box.width - place.left, box.height - place.top, () => {
    cells(painter, model.strongest ?? model.map, place, look);
    if (model.tile) cells(painter, model.tile, place, look);
    ruled(painter, place, seen, colors);
    if (model.odd) hatched(painter, place, box, model.tile ?? model.map, look);
    numbers(painter, place, seen, model, look);
    marks(painter, place, model.record, look);
  });
  rowNames(painter, box, place, seen, model, look);
  columnNames(painter, box, place, seen, model, look);
}

function cells(painter, grid, place, look) {
  const image = picture(grid, look);
  const [wide, high] = [place.cell * grid.columnBlock, place.high * grid.rowBlock];
  const [x, y] = [place.left + place.cell * grid.column0, place.top + place.high * grid.row0];
  painter.image(image, x, y, wide * grid.columns, high * grid.rows, { smooth: wide < 1 });
}

function picture(grid, look) {
  const name = `${look.scale}/${look.theme}/${look.highest}`;
  const known = painted.get(grid);
  if (known?.name === name) return known.image;
  const tops = look.scale === "row" ? rowTops(grid) : null;
  const image = pixels(grid.columns, grid.rows, (n) => {
    const highest = tops ? tops[Math.floor(n / grid.columns)] : look.highest;
    const value = grid.values[n];
    if (grid.owner && Number.isFinite(value)) return headTable(grid.owner[n], look.theme)[Math.round(255 * stretch(value, highest, look.scale))];
    return colorOf(value, highest, look.scale, look.theme);
  });
  painted.set(grid, { name, image });
  return image;
}

export function rowTops(grid) {
  const row = (i) => grid.values.subarray(i * grid.columns, (i + 1) * grid.columns);
  return Float32Array.from({ length: grid.rows }, (_, i) => mostOf(row(i)));
}

// Draws a stroke through the cells of non-finite weights, so that they are recognisable without colour.
function hatched(painter, place, box, grid, look) {
  const [wide, high] = [place.cell * grid.columnBlock, place.high * grid.rowBlock];
  if (Math.min(wide, high) < 5) return;
  const style = { stroke: look.colors.page, line: 1.25, opacity: 0.55, bend: 0 };
  grid.values.forEach((value, n) => {
    if (Number.isFinite(value)) return;
    const x = place.left + place.cell * (grid.column0 + (n % grid.columns) * grid.columnBlock);
    const y = place.top + place.high * (grid.row0 + Math.floor(n / grid.columns) * grid.rowBlock);
    const outside = x > box.x + box.width || y > box.y + box.height || x + wide < box.x || y + high < box.y;
    if (outside) return;
    for (const part of [0.5, 1]) {
      painter.curve(x, y + high * part, x + wide * part, y, style);
      if (part < 1) painter.curve(x + wide * part, y + high, x + wide, y + high * part, style);
    }
  });
}

function ruled(painter, place, seen, colors) {
  if (place.cell < 12 || place.high < 12) return;
  const [x0, y0] = [place.left + place.cell * seen.column0, place.top + place.high * seen.row0];
  const [wide, high] = [place.cell * seen.columns, place.high * seen.rows];
  const line = { fill: colors.page };
  for (let i = 0; i <= seen.rows; i++) painter.rect(x0, y0 + place.high * i - 0.75, wide, 1.5, line);
  for (let j = 0; j <= seen.columns; j++) painter.rect(x0 + place.cell * j - 0.75, y0, 1.5, high, line);
}

function numbers(painter, place, seen, model, look) {
  const grid = model.strongest ?? model.tile ?? model.map;
  if (place.cell < READABLE || place.high < 16 || grid.rowBlock > 1 || grid.columnBlock > 1) return;
  const tops = look.scale === "row" ? rowTops(grid) : null;
  for (let i = seen.row0; i < seen.row0 + seen.rows; i++) {
    for (let j = seen.column0; j < seen.column0 + seen.columns; j++) {
      const value = inside(grid, i, j) ? grid.values[(i - grid.row0) * grid.columns + j - grid.column0] : 0;
      if (Math.abs(value) < 0.005) continue;
      const highest = tops ? tops[i - grid.row0] : look.highest;
      const owner = grid.owner?.[i * grid.columns + j];
      const own = owner !== undefined && Number.isFinite(value);
      const color = own ? headInk(stretch(value, highest, look.scale), owner, look.theme) : inkOf(value, highest, look.scale, look.theme);
      const [x, y] = [place.left + place.cell * (j + 0.5), place.top + place.high * (i + 0.5)];
      const strange = !Number.isFinite(value);
      const style = { size: 11.5, color, anchor: "middle", weight: strange ? 600 : 400 };
      painter.text(strange ? odd(value) : value.toFixed(2).replace("-", "−").replace(/^(−?)0/, "$1"), x, y, style);
    }
  }
}

function marks(painter, place, record, { hover, locked, colors }) {
  const box = (row, column, opacity) => {
    const edge = { stroke: colors.mark, line: 1.5, opacity };
    // A thin line is drawn instead of a frame if the cells are so small that a frame would hide them.
    const thread = { fill: colors.mark, opacity: opacity * 0.8 };
    const [x, y] = [place.left + place.cell * column, place.top + place.high * row];
    const [wide, high] = [place.cell * record.keys, place.high * record.queries];
    if (row !== null && place.high >= 5) painter.rect(place.left, y, wide, place.high, edge);
    else if (row !== null) painter.rect(place.left, y + place.high / 2 - 0.5, wide, 1, thread);
    if (column !== null && place.cell >= 5) painter.rect(x, place.top, place.cell, high, edge);
    else if (column !== null) painter.rect(x + place.cell / 2 - 0.5, place.top, 1, high, thread);
  };
  if (hover) box(hover.row, hover.column, 0.3);
  if (!locked) return;
  box(locked.row, null, 0.9);
  if (locked.row !== null && locked.column !== null) {
    const [x, y] = [place.left + place.cell * locked.column, place.top + place.high * locked.row];
    const grow = Math.max(0, (7 - Math.min(place.cell, place.high)) / 2);
    const [wide, high] = [place.cell + 2 * grow, place.high + 2 * grow];
    // Two nested frames in different colours are visible on light and on dark cells.
    painter.rect(x - grow, y - grow, wide, high, { stroke: colors.page, line: place.cell < 7 ? 3.5 : 6 });
    painter.rect(x - grow, y - grow, wide, high, { stroke: colors.mark, line: place.cell < 7 ? 1.5 : 2.5 });
  } else box(null, locked.column, 0.9);
}

function rowNames(painter, box, place, seen, model, look) {
  const { colors, hover, locked, matches } = look;
  const every = Math.max(1, nice((model.rows ? 13 : 26) / place.high));
  painter.clip(box.x, box.y + place.top, place.left, box.height - place.top, () => {
    painter.rect(box.x, box.y + place.top, place.left, box.height, { fill: colors.page });
    for (let i = seen.row0; i < seen.row0 + seen.rows; i++) {
      const strong = i === hover?.row || i === locked?.row;
      if (!ticked(i, every) && !strong && !matches.rows.has(i)) continue;
      if (!strong && every > 1 && near(i, [hover?.row, locked?.row], every)) continue;
      // The minimum of SIZE / 2 keeps the first label from being cut off at the top.
      const y = place.top + Math.max(place.high * (i + 0.5), i ? 0 : SIZE / 2);
      const color = matches.rows.has(i) ? colors.accent : strong ? colors.text : colors.quiet;
      const style = { size: SIZE, color, anchor: "end", weight: strong || matches.rows.has(i) ? 600 : 400 };
      painter.text(fitted(labelOf(model.rows, i), place.most), box.x + place.left - 8, y, style);
    }
  });
}

function columnNames(painter, box, place, seen, model, look) {
  const { colors, hover, locked, matches } = look;
  const every = Math.max(1, nice((place.slanted ? (model.columns ? 15 : 30) : 24) / place.cell));
  painter.clip(box.x + place.left - 2, box.y, box.width - place.left + 2, place.top, () => {
    painter.rect(box.x + place.left, box.y, box.width, place.top, { fill: colors.page });
    for (let j = seen.column0; j < seen.column0 + seen.columns; j++) {
      const strong = j === hover?.column || j === locked?.column;
      if (!ticked(j, every) && !strong && !matches.columns.has(j)) continue;
      if (!strong && every > 1 && near(j, [hover?.column, locked?.column], every)) continue;
      const x = place.left + place.cell * (j + 0.5);
      const color = matches.columns.has(j) ? colors.accent : strong ? colors.text : colors.quiet;
      const style = { size: SIZE, color, weight: strong || matches.columns.has(j) ? 600 : 400 };
      const name = fitted(labelOf(model.columns, j), place.most);
      if (place.slanted) painter.text(name, x, box.y + place.top - 8, { ...style, turn: -45 });
      else painter.text(name, x, box.y + place.top - 12, { ...style, anchor: "middle" });
    }
  });
}

// Whether the n-th row or column gets a label: the first one and every `every`-th one.
function ticked(n, every) {
  return n % every === 0;
}

function near(place, others, every) {
  return others.some((other) => other !== null && other !== undefined && Math.abs(other - place) < every);
}

function fitted(label, room) {
  let text = short(label);
  while (textWidth(text, SIZE) > room && text.length > 2) text = `${text.slice(0, -2)}…`;
  return text;
}

// The colour bar below the map, from 0 (or from the most negative weight) to the largest weight.
export function scaleBar(theme, negative) {
  const color = (n) => (n < 0 ? table(theme, true)[-n] : table(theme)[n]);
  return negative ? pixels(255, 1, (n) => color(2 * n - 254)) : pixels(128, 1, (n) => color(2 * n + 1));
}

// The texts at the two ends of the colour bar.
export function scaleEnds(deepest, negative, look) {
  const how = look.scale === "root" ? ` (${look.say("root")})` : "";
  const largest = look.scale === "row" ? look.say("largestOfRow") : compact(deepest) + how;
  return [negative ? (look.scale === "row" ? "−" : `−${largest}`) : "0", largest];
}

// A colour bar for captions, with the colour of non-finite numbers.
export function legend(painter, x, y, width, deepest, look) {
  if (look.parts) {
    look.parts.reduce((left, { head, hue }) => {
      painter.rect(left, y, 12, 12, { fill: headColor(hue, look.theme), radius: 2 });
      painter.text(String(head), left + 17, y + 6, { size: 11, color: look.colors.quiet });
      return left + 24 + textWidth(String(head), 11);
    }, x);
    return;
  }
  painter.image(scaleBar(look.theme, look.negative), x, y, width, 8, { smooth: true });
  const [low, high] = scaleEnds(deepest, look.negative, look);
  painter.text(low, x, y + 18, { size: 11, color: look.colors.quiet });
  painter.text(high, x + width, y + 18, { size: 11, color: look.colors.quiet, anchor: "end" });
  if (!look.odd) return;
  painter.rect(x + width + 20, y, 14, 8, { fill: palette(look.theme).odd });
  painter.text("NaN, ±∞", x + width + 40, y + 4, { size: 11, color: look.colors.quiet });
}
