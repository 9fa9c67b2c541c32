// The view of attention over an image: a large picture with the chosen word's weights as an overlay, and a small one
// for every word.

import { inkOf, mostOf, tint } from "./colors.js";
import { labelOf, short, textWidth, weight } from "./format.js";
import { veilOf, veilScale } from "./veil.js";

const GAP = 16;
const UNDER = 66; // height of the caption and the colour scale below the large picture
const DRAWN = 96; // largest side in pixels of a picture that is enlarged by a whole factor, without smoothing
const CHIP = 28; // displayed height of a token that is not part of the image
const CHIPS = 64; // largest number of displayed tokens that are not part of the image

export const image = {
  name: "image",
  keys: "flow",
  // By default, each word's colours end at its own largest weight: a word with broad attention has small weights.
  scale: "row",
  veils: true,
  fits: (model) => model.picture !== null && Boolean(sides(model)),
  layout,
};

// Finds the axis of the map whose positions are the patches of the image. If the keys are patches (words that attend to
// an image, or patches that attend to each other), the weights of a word are its row. If the queries are patches (an
// image generated from words), the weights of a word are its column, so all rows are needed.
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
  const first = side.patches.items.length - high * wide; // number of tokens before the patches, such as the class token
  const ratio = model.picture.height / model.picture.width;
  const words = Math.min(side.words, 400);
  const large = enlarged(model.picture, Math.min(look.width - 8, words ? 440 : 520, 520 / ratio));
  // The small pictures of the words are beside the large picture if there is room, otherwise below it.
  const apart = words > 0 && beside(look, large);
  const left = apart ? large + 36 : 4;
  const top = apart ? 4 : large * ratio + UNDER + 24;
  const room = look.width - left - 4;
  const { across, small } = strip(model.picture, room);
  const flow = chipsOf(side, first, words || !beside(look, large) ? { x: 1, y: large * ratio + UNDER, wide: large }
    : { x: large + 24, y: 0, wide: look.width - large - 28 });
  const place = { side, first, high, wide, ratio, words, large, across, small, left, top, chips: flow.chips };
  place.crisp = isDrawn(model.picture);
  place.step = small * ratio + 40;
  place.chosen = side.axis === "row" ? look.active : (look.hover?.column ?? look.locked?.column ?? null);
  // If patches attend to patches, the class token is shown until the user chooses a patch.
  place.shown = place.chosen ?? (words ? peak(place, model) : first ? 0 : null);
  if (words && !apart) place.top += flow.high;
  const below = large * ratio + UNDER + 4 + (flow.x > large ? 0 : flow.high);
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

// Whether a picture is so small that it is enlarged by a whole factor, so that each pixel stays a square.
function isDrawn({ width, height }) {
  return Math.max(width, height) <= DRAWN;
}

function enlarged(picture, width) {
  const times = Math.floor(width / picture.width);
  return isDrawn(picture) && times > 1 ? times * picture.width : Math.round(width);
}

// The number of small pictures in a row, and the width of each of them.
function strip(picture, room) {
  const narrow = room < 500;
  const least = isDrawn(picture) ? enlarged(picture, narrow ? 110 : 150) : narrow ? 100 : 128;
  const across = Math.max(2, Math.floor((room + GAP) / (least + GAP)));
  return { across, small: enlarged(picture, Math.min(150, Math.floor((room - GAP * (across - 1)) / across))) };
}

// The word that is shown first: the one with the largest weight. Rows that are not loaded yet are ignored.
function peak({ side, words, first }, model) {
  if (!model.whole) return 0;
  const most = Array.from({ length: words }, (_, n) => mostOf(side.weights(n).subarray(first)));
  return Math.max(0, most.indexOf(Math.max(...most)));
}

function beside(look, large) {
  return look.width - large > 330;
}

// The layout of tokens that are not part of the image, such as the class token: below the picture, or beside it.
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
    return place.words ? found(place.shown, patch) : { row: patch, column: null };
  }
  const chip = place.chips.find((c) => x >= c.x && x < c.x + c.width && y >= c.y && y < c.y + CHIP);
  if (chip) return place.words ? found(place.shown, chip.n) : { row: chip.n, column: null };
  for (let n = 0; n < place.words; n++) {
    const at = corner(place, n);
    if (x >= at.x && x < at.x + small && y >= at.y && y < at.y + small * ratio + 24) return found(n, null);
  }
  return null;
}

function draw(painter, box, place, model, look) {
  const { colors } = look;
  const { side, shown, chosen } = place;
  const [word, patch] = side.axis === "row" ? ["row", "column"] : ["column", "row"];
  const matches = side.axis === "row" ? look.matches.rows : look.matches.columns;
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  lit(painter, 0, 0, place.large, place, model, look, shown);
  const marked = place.words ? (look.hover?.[patch] ?? look.locked?.[patch] ?? null) : shown;
  if (marked !== null) frame(painter, place, marked, colors.warm);
  caption(painter, place, model, look);
  special(painter, place, model, look, shown, marked);
  for (let n = 0; n < place.words; n++) {
    const { x, y } = corner(place, n);
    if (y > box.y + box.height || y + place.step < box.y) continue;
    lit(painter, x, y, place.small, place, model, look, n);
    const high = place.small * place.ratio;
    const [isLocked, isUnder] = [n === look.locked?.[word], n === look.hover?.[word]];
    const edge = { stroke: isLocked ? colors.mark : n === shown ? colors.accent : colors.quiet, line: 2, radius: 4 };
    if (isLocked || isUnder || n === shown) painter.rect(x - 3, y - 3, place.small + 6, high + 6, edge);
    const strong = n === (chosen ?? shown) || matches.has(n);
    const color = matches.has(n) ? colors.accent : strong ? colors.text : colors.quiet;
    const number = weight(largest(side.weights(n)), 0.0004);
    const faint = { size: 11.5, color: colors.quiet, anchor: "end" };
    const room = place.small - textWidth(number, 11.5) - 6;
    painter.text(fitted(labelOf(side.labels, n), room, strong), x, y + high + 14, { size: 13, color, weight: strong ? 600 : 400 });
    painter.text(number, x + place.small, y + high + 14, faint);
  }
}

// The name of a row or column, shortened to the available width in pixels.
function fitted(label, room, strong) {
  let text = short(label, 16);
  while (textWidth(text, 13, strong ? 600 : 400) > room && Array.from(text).length > 2) text = `${Array.from(text).slice(0, -2).join("")}…`;
  return text;
}

// Draws the text below the large picture (the word, its largest weight and its probability) and the overlay's legend.
function caption(painter, place, model, look) {
  const { side, shown, large, ratio } = place;
  const { say, colors } = look;
  const y = large * ratio + 20;
  const weights = shown === null ? side.total : side.weights(shown);
  const name = shown === null ? say("received")
    : place.words ? short(labelOf(side.labels, shown)) : `“${short(labelOf(side.patches, shown))}” ${say("looksAt")}`;
  painter.text(name, 0, y, { size: 16, color: colors.text, weight: 600 });
  if (!weights) return;
  const sure = place.words ? side.labels?.probability?.[shown] : undefined;
  const facts = [say("largestIs", { value: weight(largest(weights), 0.0004) })];
  if (Number.isFinite(sure)) facts.push(say("probabilityIs", { value: sure.toFixed(2) }));
  const apart = textWidth(name, 16, 600) + 14;
  const told = facts.join(" · ");
  const fits = apart + textWidth(told, 12.5) <= large;
  if (fits) painter.text(told, apart, y + 1, { size: 12.5, color: colors.quiet });
  veilScale(painter, 0, y + 16, Math.min(220, large / (fits ? 1 : 2)), brightest(weights.subarray(place.first), look, shown), model, look);
  if (!fits) facts.forEach((fact, n) => painter.text(fact, large / 2 + 16, y + 20 + 16 * n, { size: 12, color: colors.quiet }));
}

function largest(values) {
  return values?.find((value) => !Number.isFinite(value)) ?? mostOf(values);
}

// The weight at which the overlay is transparent: the largest weight of the given word, or of all words of all compared
// traces.
function brightest(own, look, word) {
  return look.scale === "row" || word === null ? mostOf(own) : Math.max(look.highest, 1e-12);
}

// Draws the picture under the overlay of a word, which is transparent where the weight is largest.
function lit(painter, x, y, width, place, model, look, word) {
  const height = width * place.ratio;
  painter.image(model.picture, x, y, width, height, { smooth: !place.crisp });
  const weights = word === null ? place.side.total : place.side.weights(word);
  if (!weights) return;
  const own = weights.subarray(place.first);
  const veil = veilOf(model, word, own, place, brightest(own, look, word), look);
  painter.clip(x, y, width, height, () => painter.image(veil, x, y, width, height, { smooth: !look.cells }));
}

// Draws each token that is not part of the image with its weight, in a colour of the same scale as the patches.
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
