// Every head of a model as a point: the mean entropy of its rows, against the mean distance between query and key.

import { css } from "./colors.js";
import { compact, known, nice, textWidth } from "./format.js";

const LEFT = 46;
const BOTTOM = 44;
const RADIUS = 5.5;

export const measures = {
  name: "measures",
  keys: "flow",
  fits: (about) => about.records.some((record) => record.entropy),
  layout,
};

// The points in reading order: layer by layer, head by head. `apart` is true if mean distances are known.
export function points(about) {
  const apart = about.records.some((record) => record.distance);
  const found = [];
  about.records.forEach((record, layer) => {
    for (let head = 0; head < record.heads; head++) {
      if (!known(record.entropy?.[head]) || (apart && !known(record.distance?.[head]))) continue;
      found.push({ record: layer, head, entropy: record.entropy[head], distance: record.distance?.[head] ?? null });
    }
  });
  return { apart, found };
}

// The position of a point's name: beside, above or below the point, where it covers the fewest other points.
function clear(x, y, wide, others, width, height) {
  const covered = ([left, level]) => others.filter(([px, py]) =>
    px > left - RADIUS && px < left + wide + RADIUS && Math.abs(py - level) < 7 + RADIUS).length;
  const middle = Math.max(LEFT, Math.min(width - wide, x - wide / 2));
  const places = [[x + 13, y], [x - 13 - wide, y], [middle, y - 20], [middle, y + 20], [middle, y - 38], [middle, y + 38]];
  const inside = places.filter(([left, level]) => left >= LEFT && left + wide <= width && level > 24 && level < height);
  return inside.reduce((best, place) => (covered(place) < covered(best) ? place : best), inside[0] ?? places[2]);
}

function layout({ about, names }, look) {
  const { apart, found } = points(about);
  const width = Math.max(240, look.width);
  const height = Math.min(420, Math.max(260, width * 0.8));
  const far = (point) => (apart ? point.distance : point.record);
  const largest = { x: Math.max(1e-3, ...found.map(far)), y: Math.max(1e-3, ...found.map((point) => point.entropy)) };
  const step = { x: nice(largest.x / 5), y: nice(largest.y / 5) };
  const most = { x: step.x * Math.ceil(largest.x / step.x), y: step.y * Math.ceil(largest.y / step.y) };
  const at = (point) => [
    LEFT + 8 + ((width - LEFT - 24) * far(point)) / Math.max(most.x, 1e-9),
    height - BOTTOM - 8 - ((height - BOTTOM - 28) * point.entropy) / most.y,
  ];
  return {
    width, height, found,
    draw: (painter, box) => {
      const { colors } = look;
      painter.rect(0, 0, width, height, { fill: colors.page });
      for (let n = 0; n * step.y <= most.y * 1.001; n++) {
        const y = height - BOTTOM - 8 - ((height - BOTTOM - 28) * n * step.y) / most.y;
        painter.rect(LEFT, y, width - LEFT - 8, 1, { fill: colors.line });
        painter.text(compact(n * step.y), LEFT - 8, y, { size: 11, color: colors.quiet, anchor: "end" });
      }
      for (let n = 0; apart && n * step.x <= most.x * 1.001; n++) {
        const x = LEFT + 8 + ((width - LEFT - 24) * n * step.x) / most.x;
        painter.text(compact(n * step.x), x, height - BOTTOM + 10, { size: 11, color: colors.quiet, anchor: "middle" });
      }
      painter.text(look.say("entropyAxis"), 0, 8, { size: 11.5, color: colors.quiet });
      const quiet = { size: 11.5, color: colors.quiet, anchor: "end" };
      painter.text(look.say(apart ? "distanceAxis" : "orderAxis"), width - 8, height - 12, quiet);
      found.forEach((point) => {
        const [x, y] = at(point);
        const depth = 0.25 + 0.75 * (about.records.length > 1 ? point.record / (about.records.length - 1) : 1);
        painter.circle(x, y, RADIUS, { fill: css(depth, look.theme), stroke: colors.page, line: 1 });
      });
      found.forEach((point) => {
        const chosen = point.record === look.record && point.head === look.head;
        if (!chosen) return;
        const [x, y] = at(point);
        painter.circle(x, y, RADIUS + 3, { stroke: colors.mark, line: 2 });
        const name = `${names[point.record]} · ${point.head}`;
        const style = { size: 12, color: colors.text, weight: 600 };
        const [left, level] = clear(x, y, textWidth(name, 12, 600), found.map(at), width, height - BOTTOM);
        painter.text(name, left, level, style);
      });
    },
    hit: (x, y) => {
      let best = null;
      found.forEach((point, n) => {
        const [px, py] = at(point);
        const far2 = Math.hypot(px - x, py - y);
        if (far2 < 14 && (!best || far2 < best.far2)) best = { n, far2 };
      });
      return best ? { row: best.n, column: null } : null;
    },
  };
}
