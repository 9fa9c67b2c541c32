// The view of attention over sound: a spectrogram, and below it a row for each symbol with the weights of the frames,
// on the same time axis.

import { colorOf, css, mostOf, stretch } from "./colors.js";
import { labelOf, nice, short, textWidth } from "./format.js";
import { pixels } from "./painter.js";

const HIGH = 24;
const TALL = 150; // height of the displayed spectrogram in pixels

export const sound = {
  name: "sound",
  keys: "flow",
  plays: true,
  fits: (model) => model.columns?.kind === "frames",
  layout,
};

function layout(model, look) {
  let widest = 24;
  for (let n = 0; n < Math.min(model.record.queries, 400); n++) {
    widest = Math.max(widest, textWidth(short(labelOf(model.rows, n), 14), 13));
  }
  const place = { left: widest + 16, top: model.picture ? TALL + 34 : 30 };
  place.wide = Math.max(120, look.width - place.left - 10);
  return {
    width: look.width,
    height: place.top + HIGH * model.record.queries + 8,
    deepest: look.highest,
    draw: (painter, box) => draw(painter, box, place, model, look),
    hit: (x, y) => hit(x, y, place, model.record),
    at: (row) => ({ x: 0, y: place.top + HIGH * (row + 0.5), left: 0, top: 0 }),
  };
}

function hit(x, y, place, record) {
  const row = Math.floor((y - place.top) / HIGH);
  const frame = Math.floor(((x - place.left) / place.wide) * record.keys);
  const column = frame >= 0 && frame < record.keys ? frame : null;
  if (row >= record.queries || (row < 0 && column === null)) return null;
  return { row: row < 0 ? null : row, column };
}

// The interval in seconds that a symbol attends to: the frames around its largest weight whose weights are at least
// half of it.
export function heard(weights, seconds) {
  let peak = 0;
  weights.forEach((value, n) => value > weights[peak] && (peak = n));
  let [from, to] = [peak, peak];
  while (from > 0 && weights[from - 1] >= weights[peak] / 2) from--;
  while (to < weights.length - 1 && weights[to + 1] >= weights[peak] / 2) to++;
  return { from: from * seconds, to: (to + 1) * seconds, at: (peak + 0.5) * seconds };
}

function draw(painter, box, place, model, look) {
  const { colors } = look;
  const { record } = model;
  const seconds = model.columns.seconds ?? 1;
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  const chosen = look.active === null ? null : model.weights(look.active);
  if (model.picture) {
    painter.image(model.picture, place.left, 0, place.wide, TALL);
    if (chosen) {
      const most = mostOf(chosen);
      const dim = (n) => Math.round(190 * (1 - stretch(chosen[n], most, look.scale)));
      const veil = pixels(record.keys, 1, (n) => [10, 12, 16, dim(n)]);
      painter.image(veil, place.left, 0, place.wide, TALL, { smooth: true });
    }
  }
  axis(painter, place, record.keys * seconds, model, look);
  for (let i = 0; i < record.queries; i++) strip(painter, box, place, model, look, i, seconds);
  if (look.time != null) { // while the sound plays, a line marks its current position
    const x = place.left + (place.wide * look.time) / (record.keys * seconds);
    painter.rect(Math.min(x, place.left + place.wide) - 1, 0, 2, place.top + HIGH * record.queries, { fill: colors.warm });
  }
  if (look.hover?.column != null) {
    const x = place.left + (place.wide * (look.hover.column + 0.5)) / record.keys;
    painter.rect(x - 0.5, 0, 1, place.top + HIGH * record.queries, { fill: colors.mark, opacity: 0.5 });
  }
}

function axis(painter, place, length, model, look) {
  const { colors } = look;
  const y = place.top - 20;
  const step = nice((56 * length) / place.wide);
  for (let n = 0; n * step <= length + 1e-9; n++) {
    const x = place.left + (place.wide * n * step) / length;
    painter.rect(x, y - 8, 1, 5, { fill: colors.quiet });
    const last = (n + 1) * step > length + 1e-9;
    const digits = step < 0.1 ? 2 : step < 1 ? 1 : 0;
    const unit = last && model.columns.seconds ? ` ${look.say("secondsUnit")}` : "";
    const anchor = n === 0 ? "start" : last ? "end" : "middle";
    painter.text((n * step).toFixed(digits) + unit, x, y + 4, { size: 11, color: colors.quiet, anchor });
  }
}

function strip(painter, box, place, model, look, i, seconds) {
  const y = place.top + HIGH * i;
  if (y > box.y + box.height || y + HIGH < box.y) return;
  const { colors, matches } = look;
  const weights = model.weights(i);
  if (weights) {
    const most = look.scale === "row" ? mostOf(weights) : look.highest;
    const image = pixels(weights.length, 1, (n) => colorOf(weights[n], most, look.scale, look.theme));
    painter.image(image, place.left, y + 2, place.wide, HIGH - 4, { smooth: weights.length > place.wide });
  } else painter.rect(place.left, y + 2, place.wide, HIGH - 4, { fill: css(0, look.theme) });
  const strong = i === look.active;
  const edge = { stroke: colors.mark, line: i === look.locked?.row ? 2 : 1, radius: 2 };
  if (strong) painter.rect(place.left, y + 1, place.wide, HIGH - 2, edge);
  if (strong && weights && model.columns.seconds) {
    const { from, to } = heard(weights, seconds);
    const [x0, x1] = [from, to].map((at) => place.left + (place.wide * at) / (weights.length * seconds));
    if (model.picture) painter.rect(x0, 0, x1 - x0, TALL, { stroke: colors.warm, line: 2 });
  }
  const color = matches.rows.has(i) ? colors.accent : strong ? colors.text : colors.quiet;
  const style = { size: 13, color, anchor: "end", weight: strong || matches.rows.has(i) ? 600 : 400 };
  painter.text(short(labelOf(model.rows, i), 14), place.left - 8, y + HIGH / 2, style);
}
