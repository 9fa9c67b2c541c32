// An image lit where it is looked at: large for the chosen word, small for every word.

import { colorOf, inkOf, mostOf, stretch, tint } from "./colors.js";
import { labelOf, short, textWidth, weight } from "./format.js";
import { pixels } from "./painter.js";

const GAP = 16;
const CHIP = 28; // height of a token that is none of the image
const CHIPS = 64; // of them, at most

export const image = {
  name: "image",
  keys: "flow",
  fits: (model) => model.picture !== null && Boolean(sides(model)),
  layout,
};

// Which side of the map is the image. Keys, as when words are written about it or patches look at each other; or
// queries, as when an image is painted from words: then a word's map is its column, and all rows must be there.
function sides(model) {
  const { rows, columns, map, record } = model;
  const isImage = (labels) => labels?.kind === "patches" && Boolean(labels.grid);
  if (isImage(columns)) {
    const words = isImage(rows) ? 0 : record.queries;
    return { patches: columns, labels: rows, words, axis: "row", weights: model.weights, total: model.received };
  }
  if (!isImage(rows) || map.rowBlock > 1 || map.columnBlock > 1) return null;
  const weights = (word) => Float32Array.from({ length: map.rows }, (_, i) => map.values[i * map.columns + word]);
  return { patches: rows, labels: columns, words: record.keys, axis: "column", weights, total: null };
}

function layout(model, look) {
  const side = sides(model);
  const [high, wide] = side.patches.grid;
  const first = side.patches.items.length - high * wide; // tokens before the patches, such as the one for the class
  const ratio = model.picture.height / model.picture.width;
  const words = Math.min(side.words, 400);
  const large = Math.round(Math.min(look.width - 8, words ? 440 : 520, 520 / ratio));
  // The words' pictures stand beside the large one where there is room, else below it.
  const apart = words > 0 && beside(look, large);
  const left = apart ? large + 36 : 4;
  const top = apart ? 4 : large * ratio + 56;
  const across = Math.max(2, Math.floor((look.width - left + GAP) / (128 + GAP)));
  const small = Math.min(150, Math.floor((look.width - left - 4 - GAP * (across - 1)) / across));
  const flow = chipsOf(side, first, words || !beside(look, large) ? { x: 1, y: large * ratio + 40, wide: large }
    : { x: large + 24, y: 0, wide: look.width - large - 28 });
  const place = { side, first, high, wide, ratio, words, large, across, small, left, top, chips: flow.chips };
  place.step = small * ratio + 40;
  if (words && !apart) place.top += flow.high;
  const below = large * ratio + 44 + (flow.x > large ? 0 : flow.high);
  return {
    width: words ? Math.max(large, left + Math.min(words, across) * (small + GAP) - GAP + 4) : Math.max(large, flow.right),
    height: Math.max(below, flow.x > large ? flow.y + flow.high : 0, words ? place.top + Math.ceil(words / across) * place.step : 0),
    deepest: null,
    axis: side.axis,
    draw: (painter, box) => draw(painter, box, place, model, look),
    hit: (x, y) => hit(x, y, place),
    at: (row, column) => {
      const { x, y } = words ? corner(place, side.axis === "row" ? row : column) : { x: 0, y: 0 };
      return { x, y, left: 0, top: 0 };
    },
  };
}

function beside(look, large) {
  return look.width - large > 330;
}

// Tokens of the sequence that are no part of the image, such as the one for the class: below the picture, or beside it.
function chipsOf(side, first, { x, y, wide }) {
  const chips = [];
  let [left, top] = [x, y];
  for (let n = 0; n < Math.min(first, CHIPS); n++) {
    const name = short(labelOf(side.patches, n), 20);
    const width = textWidth(name, 13, 600) + 68;
    if (left + width > x + wide && left > x) [left, top] = [x, top + CHIP + 6];
    chips.push({ n, name, x: left, y: top, width });
    left += width + 6;
  }
  const right = chips.reduce((most, chip) => Math.max(most, chip.x + chip.width), 0);
  return { chips, x, y, right: right + 2, high: chips.length ? top - y + CHIP + 12 : 0 };
}

function corner({ across, small, left, top, step }, n) {
  return { x: left + (n % across) * (small + GAP), y: top + Math.floor(n / across) * step };
}

function hit(x, y, place) {
  const { side, first, large, ratio, wide, high, small } = place;
  const found = (word, patch) => (side.axis === "row" ? { row: word, column: patch } : { row: patch, column: word });
  if (x >= 0 && y >= 0 && x < large && y < large * ratio) {
    const patch = first + Math.floor((y / (large * ratio)) * high) * wide + Math.floor((x / large) * wide);
    return place.words ? found(null, patch) : { row: patch, column: null };
  }
  const chip = place.chips.find((c) => x >= c.x && x < c.x + c.width && y >= c.y && y < c.y + CHIP);
  if (chip) return place.words ? found(null, chip.n) : { row: chip.n, column: null };
  for (let n = 0; n < place.words; n++) {
    const at = corner(place, n);
    if (x >= at.x && x < at.x + small && y >= at.y && y < at.y + small * ratio + 24) return found(n, null);
  }
  return null;
}

function draw(painter, box, place, model, look) {
  const { colors } = look;
  const { side } = place;
  const [word, patch] = side.axis === "row" ? ["row", "column"] : ["column", "row"];
  const chosen = side.axis === "row" ? look.active : (look.hover?.column ?? look.locked?.column ?? null);
  const matches = side.axis === "row" ? look.matches.rows : look.matches.columns;
  const shown = chosen ?? (place.words || place.first ? 0 : null); // of patches, what the class token looks at
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  lit(painter, 0, 0, place.large, place, model, look, shown);
  const marked = place.words ? (look.hover?.[patch] ?? look.locked?.[patch] ?? null) : shown;
  if (marked !== null) frame(painter, place, marked, colors.warm);
  const name = shown === null ? look.say("received")
    : place.words ? short(labelOf(side.labels, shown)) : `“${short(labelOf(side.patches, shown))}” ${look.say("looksAt")}`;
  painter.text(name, 0, place.large * place.ratio + 20, { size: 16, color: colors.text, weight: 600 });
  special(painter, place, model, look, shown, marked);
  for (let n = 0; n < place.words; n++) {
    const { x, y } = corner(place, n);
    if (y > box.y + box.height || y + place.step < box.y) continue;
    lit(painter, x, y, place.small, place, model, look, n);
    const high = place.small * place.ratio;
    const [isLocked, isUnder] = [n === look.locked?.[word], n === look.hover?.[word]];
    const edge = { stroke: isLocked ? colors.mark : colors.quiet, line: 2, radius: 4 };
    if (isLocked || isUnder) painter.rect(x - 3, y - 3, place.small + 6, high + 6, edge);
    const strong = n === chosen || matches.has(n);
    const color = matches.has(n) ? colors.accent : strong ? colors.text : colors.quiet;
    painter.text(short(labelOf(side.labels, n), 16), x, y + high + 14, { size: 13, color, weight: strong ? 600 : 400 });
    const values = side.weights(n);
    const most = values?.find((value) => !Number.isFinite(value)) ?? mostOf(values);
    const faint = { size: 11.5, color: colors.quiet, anchor: "end" };
    painter.text(weight(most, 0.0004), x + place.small, y + high + 14, faint);
  }
}

// The picture in the light of a word's weights: full where the weight is largest, dimmed where there is none.
function lit(painter, x, y, width, place, model, look, word) {
  const height = width * place.ratio;
  painter.image(model.picture, x, y, width, height);
  const weights = word === null ? place.side.total : place.side.weights(word);
  if (!weights) return;
  const own = weights.subarray(place.first);
  const most = mostOf(own);
  const shadow = look.theme === "dark" ? [8, 10, 14] : [24, 28, 36];
  const dim = (n) => Math.round(205 * (1 - stretch(own[n] ?? 0, most, look.scale)));
  const strange = (n) => !Number.isFinite(own[n] ?? 0);
  const veil = pixels(place.wide, place.high, (n) => (strange(n) ? [...colorOf(NaN, most, look.scale, look.theme), 220] : [...shadow, dim(n)]));
  painter.clip(x, y, width, height, () => painter.image(veil, x, y, width, height, { smooth: true }));
}

// Each with the weight it gets, in the colour that says how that compares with the patches.
function special(painter, { side, chips, words }, model, look, shown, marked) {
  const weights = shown === null ? side.total : side.weights(shown);
  const most = mostOf(weights);
  for (const { n, name, x, y, width } of chips) {
    const own = weights?.[n] ?? 0;
    painter.rect(x, y, width, CHIP, { fill: tint(own, most, look.scale, look.theme), radius: CHIP / 2 });
    const asks = !words && n === shown;
    const edge = n === marked || asks ? look.colors.warm : look.colors.line;
    painter.rect(x, y, width, CHIP, { stroke: edge, line: n === marked || asks ? 2 : 1, radius: CHIP / 2 });
    const color = inkOf(own, most, look.scale, look.theme);
    painter.text(name, x + 12, y + CHIP / 2 + 0.5, { size: 13, color, weight: 600 });
    const value = weights ? weight(weights[n], 0.0004) : "";
    painter.text(value, x + width - 12, y + CHIP / 2 + 0.5, { size: 12, color, anchor: "end" });
  }
}

function frame(painter, { first, large, ratio, wide, high }, place, color) {
  const n = place - first;
  if (n < 0) return;
  const [w, h] = [large / wide, (large * ratio) / high];
  painter.rect((n % wide) * w, Math.floor(n / wide) * h, w, h, { stroke: color, line: 2.5 });
}
