// The view of a map as lines: queries at the left, keys at the right, and a line for each weight above a threshold.

import { headColor, palette, stretch, tint } from "./colors.js";
import { labelOf, short, textWidth, weight } from "./format.js";

const SIZE = 13;
const HIGH = 22; // height in pixels of a line of text
const MOST = 1200; // largest number of drawn lines; more would be unreadable
const BAR = 4; // width in pixels of the bar that shows the weight of one head
const known = new WeakMap(); // a cache of the positions of the largest weights of each attention map

export const lines = {
  name: "lines",
  keys: "flow",
  fits: () => true,
  layout,
};

function layout(model, look) {
  const { record } = model;
  const room = Math.max(70, Math.min(180, look.width * 0.28));
  const left = Math.min(room, widest(model.rows, record.queries)) + 20;
  // Width of the bars, one for each head, before each key's name.
  const bars = model.parts ? model.parts.length * BAR : BAR;
  const right = Math.min(room, widest(model.columns, record.keys)) + 60 + bars;
  const gap = Math.max(90, Math.min(340, look.width - left - right));
  const place = { left, gap, right, room, bars };
  return {
    width: left + gap + right,
    height: HIGH * Math.max(record.queries, record.keys) + 16,
    deepest: null,
    held: true,
    draw: (painter, box) => draw(painter, box, place, model, look),
    hit: (x, y) => hit(x, y, place, record),
    at: (row) => ({ x: left, y: 8 + HIGH * (row + 0.5), left: 0, top: 0 }),
  };
}

function widest(labels, count) {
  let most = 20;
  for (let n = 0; n < Math.min(count, 600); n++) most = Math.max(most, textWidth(short(labelOf(labels, n)), SIZE));
  return most;
}

function hit(x, y, place, record) {
  const n = Math.floor((y - 8) / HIGH);
  if (n < 0) return null;
  if (x < place.left + place.gap * 0.5) return n < record.queries ? { row: n, column: null } : null;
  return n < record.keys ? { row: null, column: n } : null;
}

function draw(painter, box, place, model, look) {
  const { colors } = look;
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  const chosen = look.active === null ? null : model.weights(look.active);
  strands(painter, box, place, model, look, chosen);
  const from = Math.max(0, Math.floor((box.y - 8) / HIGH));
  const to = Math.ceil((box.y + box.height) / HIGH);
  for (let i = from; i < Math.min(to, model.record.queries); i++) name(painter, place, model, look, i, "row", null);
  for (let j = from; j < Math.min(to, model.record.keys); j++) name(painter, place, model, look, j, "column", chosen);
}

function strands(painter, box, place, model, look, chosen) {
  const { accent, warm, odd } = palette(look.theme);
  const each = chosen && model.parts ? model.partsOf(look.active) : null;
  const found = (model.parts ?? [model]).flatMap((part, n) => {
    const color = model.parts ? headColor(part.hue, look.theme) : null;
    const own = links(part.map, model, look, chosen && (each ? each[n] : chosen));
    return own.map(([i, j, value, most]) => ({
      i, j, share: stretch(value, most, look.scale),
      stroke: Number.isFinite(value) ? (value < 0 ? warm : (color ?? accent)) : odd,
    }));
  });
  found.sort((a, b) => b.share - a.share);
  const near = (n) => 8 + HIGH * (n + 0.5) > box.y - 600 && 8 + HIGH * (n + 0.5) < box.y + box.height + 600;
  for (const { i, j, share, stroke } of found.slice(0, MOST).reverse()) {
    if (!near(i) && !near(j)) continue;
    const style = { stroke, line: 0.75 + (model.parts ? 2.25 : 3.5) * share, opacity: 0.12 + 0.78 * share };
    painter.curve(place.left, 8 + HIGH * (i + 0.5), place.left + place.gap, 8 + HIGH * (j + 0.5), style);
  }
}

// The weights of a head that are drawn as lines: [row, column, weight, weight at which a line has its full width].
function links(map, { record }, look, chosen) {
  const found = [];
  if (chosen) {
    chosen.forEach((value, j) => counts(value, look.rowHighest * 0.02) && found.push([look.active, j, value, look.rowHighest]));
  } else if (look.hover?.column != null && map.rowBlock === 1) {
    for (let i = 0; i < record.queries; i++) {
      const value = map.values[i * record.keys + look.hover.column];
      if (counts(value, look.highest * 0.02)) found.push([i, look.hover.column, value, look.highest]);
    }
  } else if (map.rowBlock === 1 && map.columnBlock === 1) {
    for (const n of strongest(map, look.highest * (look.parts ? 0.15 : 0.06))) found.push([Math.floor(n / record.keys), n % record.keys, map.values[n], look.highest]);
  }
  return found;
}

// The positions of the largest weights of a map, cached.
function strongest(map, least) {
  if (known.get(map)?.least !== least) {
    const places = [];
    map.values.forEach((value, n) => counts(value, least) && places.push(n));
    const share = (n) => stretch(map.values[n], map.highest, "linear");
    known.set(map, { least, places: places.sort((a, b) => share(b) - share(a)).slice(0, MOST) });
  }
  return known.get(map).places;
}

// Whether a weight is drawn as a line; non-finite weights always are.
function counts(value, least) {
  return !Number.isFinite(value) || Math.abs(value) > least;
}

function name(painter, place, model, look, n, side, chosen) {
  const { colors, hover, locked, matches } = look;
  const isRow = side === "row";
  const y = 8 + HIGH * (n + 0.5);
  const strong = isRow ? n === look.active : n === hover?.column || n === locked?.column;
  const match = (isRow ? matches.rows : matches.columns).has(n);
  const text = fitted(labelOf(isRow ? model.rows : model.columns, n), place.room);
  const wide = textWidth(text, SIZE, strong ? 600 : 400);
  const x = isRow ? place.left - 10 : place.left + place.gap + 6 + place.bars;
  const [value, most] = chosen ? [chosen[n], look.rowHighest] : [model.received[n], model.mostReceived];
  const depth = isRow ? 0 : stretch(value, most, look.scale);
  const top = y - HIGH / 2;
  if (!isRow) bars(painter, place.left + place.gap + 3, top + 2, model, look, n, depth > 0.04 ? tint(value, most, look.scale, look.theme) : null);
  const edge = { stroke: colors.mark, line: 1.5, radius: 4 };
  if (isRow && n === locked?.row) painter.rect(x - wide - 6, top + 1, wide + 12, HIGH - 2, edge);
  const color = match ? colors.accent : strong || (chosen && depth > 0.15) ? colors.text : colors.quiet;
  painter.text(text, x, y, { size: SIZE, color, anchor: isRow ? "end" : "start", weight: strong || match ? 600 : 400 });
  if (chosen && !isRow && depth > 0.15) {
    painter.text(weight(chosen[n], 0.0004), x + wide + 10, y, { size: 11.5, color: colors.quiet });
  }
}

// Draws the weight that a key receives as a bar before its name: one bar in the colour of the weight, or, if several
// heads are shown, one bar for each head.
function bars(painter, x, y, model, look, n, fill) {
  if (!model.parts) {
    if (fill) painter.rect(x, y, BAR, HIGH - 4, { fill, radius: 2 });
    return;
  }
  const each = look.active === null ? model.parts.map((part) => part.received) : model.partsOf(look.active);
  const most = look.active === null ? model.mostReceived : look.rowHighest;
  model.parts.forEach((part, place) => {
    const share = each ? stretch(each[place][n], most, look.scale) : 0;
    if (share > 0.04) painter.rect(x + place * BAR, y, BAR - 0.5, HIGH - 4, { fill: headColor(part.hue, look.theme), opacity: share });
  });
}

function fitted(label, room) {
  let text = short(label);
  while (textWidth(text, SIZE) > room && text.length > 2) text = `${text.slice(0, -2)}…`;
  return text;
}
