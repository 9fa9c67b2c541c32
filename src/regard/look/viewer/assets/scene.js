// A traffic scene from above: every object at its position, with its weight as a colour and as a line.

import { mostOf, stretch, tint } from "./colors.js";
import { labelOf, short, textWidth, weight } from "./format.js";

const LONG = 5; // length of a drawn vehicle in metres
const BROAD = 2;
const EDGE = 34;
const SOON = 0.4; // seconds of motion that a dotted line shows

export const scene = {
  name: "scene",
  help: "sceneHelp",
  keys: "flow",
  fits: ({ columns }) => columns?.kind === "objects" && [columns.x, columns.y].every((places) => places?.length === columns.items.length),
  layout,
};

function layout(model, look) {
  const { x, y } = model.columns;
  const [west, east] = [Math.min(...x) - LONG, Math.max(...x) + LONG];
  const [north, south] = [Math.min(...y) - LONG, Math.max(...y) + LONG];
  // The scale has a minimum, so that vehicles stay visible: a wide scene is scrolled instead.
  const scale = Math.max(7, Math.min((look.width - 2 * EDGE) / (east - west), 420 / (south - north), 26));
  const width = Math.max(look.width, (east - west) * scale + 2 * EDGE);
  const height = Math.max(200, (south - north) * scale + 2 * EDGE + 24);
  const origin = { x: width / 2 - ((west + east) / 2) * scale, y: (height - 24) / 2 - ((north + south) / 2) * scale };
  const at = (n) => [origin.x + x[n] * scale, origin.y + y[n] * scale];
  const place = { scale, width, height, at };
  return {
    width,
    height,
    deepest: mostOf(shownWeights(model, look)),
    draw: (painter, box) => draw(painter, box, place, model, look),
    hit: (px, py) => {
      const near = x.map((_, n) => [n, Math.hypot(at(n)[0] - px, at(n)[1] - py)]).sort((a, b) => a[1] - b[1])[0];
      return near && near[1] < Math.max(14, LONG * scale * 0.7) ? { row: asks(model, near[0]), column: near[0] } : null;
    },
    at: (row) => {
      const self = asker(model, row);
      return self < 0 ? { x: 0, y: 0, left: 0, top: 0 } : { x: at(self)[0], y: at(self)[1], left: 0, top: 0 };
    },
  };
}

function shownWeights(model, look) {
  return look.active === null ? model.received : model.weights(look.active);
}

// The row of the attention map whose query is the given object, if the queries are objects too; otherwise null.
function asks(model, column) {
  if (!model.rows) return null;
  const row = model.rows.items.indexOf(model.columns.items[column]);
  return row >= 0 && model.rows.items.length > 1 ? row : null;
}

// The index of the object that is the query: the object whose name is the label of the row; −1 if there is none.
function asker(model, row) {
  return row === null || !model.rows ? -1 : model.columns.items.indexOf(model.rows.items[row]);
}

function draw(painter, box, place, model, look) {
  const { colors } = look;
  const { items, heading = [], speed = [] } = model.columns;
  const chosen = look.active;
  const weights = shownWeights(model, look);
  const most = mostOf(weights);
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  measure(painter, place, colors, look);
  const self = asker(model, chosen);
  if (self >= 0 && weights) {
    rings(painter, place, place.at(self), colors, look);
    const [x0, y0] = place.at(self);
    weights.forEach((value, n) => {
      const share = stretch(value, most, look.scale);
      if (n === self || share < 0.03) return;
      const [x1, y1] = place.at(n);
      const style = { stroke: colors.accent, line: 1 + 7 * share, opacity: 0.2 + 0.6 * share, bend: 0 };
      painter.curve(x0, y0, x1, y1, style);
    });
  }
  items.forEach((item, n) => {
    const [x, y] = place.at(n);
    const turn = heading[n] ?? 0;
    const far = (speed[n] ?? 0) * SOON * place.scale;
    const dotted = { stroke: colors.quiet, line: 1.5, bend: 0, dash: [3, 3] };
    if (far) painter.curve(x, y, x + Math.cos(turn) * far, y + Math.sin(turn) * far, dotted);
    const strong = n === look.hover?.column || n === look.locked?.column || look.matches.columns.has(n);
    painter.polygon(body(x, y, turn, Math.max(1.6, place.scale)), {
      fill: tint(weights?.[n] ?? 0, most, look.scale, look.theme), line: n === self || strong ? 3 : 1,
      stroke: n === self ? colors.warm : strong ? colors.mark : colors.quiet,
    });
  });
  names(painter, place, model, look, weights, self);
}

function names(painter, place, model, look, weights, self) {
  const { colors } = look;
  const isStrong = (n) => n === look.hover?.column || n === look.locked?.column || n === self;
  const order = model.columns.items.map((_, n) => n);
  order.sort((a, b) => isStrong(b) - isStrong(a) || (weights?.[b] ?? 0) - (weights?.[a] ?? 0));
  // The most attended objects are labelled first. A label that would cover another one is moved above its object, or
  // omitted.
  const taken = [];
  for (const n of order) {
    const strong = isStrong(n);
    const [x, y] = place.at(n);
    const name = short(labelOf(model.columns, n), 16) + (weights ? `  ${weight(weights[n], 0.0004)}` : "");
    const half = textWidth(name, 12, strong ? 600 : 400) / 2 + 3;
    const turn = model.columns.heading?.[n] ?? 0;
    // Height of the rotated vehicle in the picture, in metres.
    const tall = Math.abs(Math.sin(turn)) * LONG + Math.abs(Math.cos(turn)) * BROAD;
    const away = Math.max(8, (tall / 2) * place.scale) + 11;
    const apart = (other, at) => Math.abs(other.x - x) > other.half + half || Math.abs(other.y - at) > 15;
    const free = (at) => taken.every((other) => apart(other, at));
    const level = [y + away, y - away].find(free) ?? (strong ? y + away : null);
    if (level === null) continue;
    taken.push({ x, y: level, half });
    painter.text(name, x, level, {
      size: 12, anchor: "middle", weight: strong ? 600 : 400,
      color: look.matches.columns.has(n) ? colors.accent : strong ? colors.text : colors.quiet,
    });
  }
}

function body(x, y, turn, scale) {
  const [cos, sin] = [Math.cos(turn), Math.sin(turn)];
  const corners = [[-0.5, -0.5], [0.3, -0.5], [0.5, -0.2], [0.5, 0.2], [0.3, 0.5], [-0.5, 0.5]];
  return corners.map(([u, v]) => {
    const [a, b] = [u * LONG * scale, v * BROAD * scale];
    return [x + a * cos - b * sin, y + a * sin + b * cos];
  });
}

function rings(painter, place, [x, y], colors, look) {
  const step = [5, 10, 20, 50, 100].find((n) => n * place.scale > 60) ?? 200;
  for (let n = 1; n <= 3; n++) {
    painter.circle(x, y, n * step * place.scale, { stroke: colors.line, line: 1.25 });
    const style = { size: 10.5, color: colors.quiet, anchor: "middle" };
    painter.text(look.say("metres", { value: n * step }), x, y - n * step * place.scale - 8, style);
  }
}

function measure(painter, place, colors, look) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200].find((n) => n * place.scale > 50) ?? 500;
  const y = place.height - 14;
  painter.rect(12, y, step * place.scale, 2, { fill: colors.quiet });
  painter.text(look.say("metres", { value: step }), 12 + step * place.scale + 8, y, { size: 11, color: colors.quiet });
}
