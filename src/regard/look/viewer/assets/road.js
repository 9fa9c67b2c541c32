// A driving scene from above: the road, the ego vehicle, and the objects with their weights, step by step.

import { stretch, tint } from "./colors.js";
import { labelOf, short, textWidth } from "./format.js";

const [BEHIND, AHEAD, LEFT, RIGHT] = [18, 62, 15, 11]; // visible distance around the ego vehicle, in metres
const OWN = [4.5, 1.9]; // length and width of the ego vehicle, in metres
const SOON = 0.8; // seconds of motion that a dotted line shows
const WIDE = 3.5; // half of the width of a crossing road, in metres
const MOST = 1; // weight of the darkest colour, the same in every step, so that the colours of steps can be compared
const NAMED = 0.05; // smallest weight of an object with a label
const ROAD = {
  light: { ground: "#eef2ea", pavement: "#e4e5e8", asphalt: "#cfd3d9", paint: "#ffffff", body: "#f8f9fb" },
  dark: { ground: "#182018", pavement: "#242a32", asphalt: "#323a45", paint: "#8d97a5", body: "#1a2028" },
};

export const road = {
  name: "road",
  help: "roadHelp",
  keys: "flow",
  fits: ({ columns }) => columns?.kind === "objects" && columns.ego?.length >= 4 && framesOf(columns) > 0,
  frames: ({ columns }) => framesOf(columns),
  layout,
};

// The number of scenes, one for each row of the map; 0 if the coordinates do not match that number.
function framesOf({ ego, x, y, items }) {
  const frames = ego.length / 4;
  return [x, y].every((places) => places?.length === frames * items.length) ? frames : 0;
}

function layout(model, look) {
  const { columns } = model;
  const frame = framesOf(columns) > 1 ? (look.active ?? 0) : 0;
  const [egoX, egoY, egoTurn, egoSpeed] = columns.ego.slice(4 * frame, 4 * frame + 4);
  const scale = Math.max(5, look.width / (BEHIND + AHEAD));
  const place = { scale, width: scale * (BEHIND + AHEAD), height: scale * (LEFT + RIGHT), frame };
  place.at = (x, y) => [(x - egoX + BEHIND) * scale, (y + LEFT) * scale];
  place.ego = { x: egoX, y: egoY, turn: egoTurn, speed: egoSpeed };
  place.objects = objectsOf(model, frame);
  return {
    width: place.width,
    height: place.height,
    deepest: MOST,
    draw: (painter, box) => draw(painter, box, place, model, look),
    hit: (px, py) => hit(px, py, place),
    at: () => ({ x: place.at(egoX, egoY)[0], y: place.at(egoX, egoY)[1], left: 0, top: 0 }),
  };
}

// The objects present in a scene: their position, heading, speed and size.
function objectsOf({ columns }, frame) {
  const count = columns.items.length;
  const of = (name, n, other) => columns[name]?.[frame * count + n] ?? other;
  const all = columns.items.map((_, n) => ({
    n, x: of("x", n), y: of("y", n), turn: of("heading", n, 0), speed: of("speed", n, 0),
    length: of("length", n, 4.5), width: of("width", n, 1.9), present: of("present", n, 1),
  }));
  return all.filter(({ present }) => present);
}

function hit(px, py, place) {
  const far = ({ x, y }) => Math.hypot(place.at(x, y)[0] - px, place.at(x, y)[1] - py);
  const [near] = [...place.objects].sort((a, b) => far(a) - far(b));
  const close = near && far(near) < Math.max(12, near.length * place.scale * 0.6);
  return close ? { row: place.frame, column: near.n } : null;
}

function draw(painter, box, place, model, look) {
  const weights = model.weights(place.frame);
  painter.clip(box.x, box.y, box.width, box.height, () => {
    ground(painter, place, model.columns, ROAD[look.theme]);
    asked(painter, place, weights, look);
    for (const one of place.objects) object(painter, place, one, weights?.[one.n] ?? 0, look);
    self(painter, place, look);
    names(painter, place, model, look, weights);
  });
  const row = model.rows ? labelOf(model.rows, place.frame) : "";
  painter.text(short(row, 60), box.x + 12, 18, { size: 15, color: look.colors.text, weight: 600 });
  measure(painter, place, box, look);
}

// Draws pavements, lanes, crossings, zebra crossings and ramps. Dashes have fixed positions on the road, so they move
// past the ego vehicle.
function ground(painter, place, columns, paint) {
  const { scale, width, height, at, ego } = place;
  const lines = columns.lanes?.length > 1 ? columns.lanes : [-5.25, -1.75, 1.75];
  const [top, bottom] = [lines[0], lines.at(-1)];
  const [from, to] = [ego.x - BEHIND, ego.x + AHEAD];
  const level = (y) => at(0, y)[1];
  const near = (places = []) => places.filter((x) => x > from - 40 && x < to + 40);
  painter.rect(0, 0, width, height, { fill: paint.ground });
  painter.rect(0, level(top - 5), width, (bottom - top + 10) * scale, { fill: paint.pavement });
  for (const x of near(columns.crossings)) {
    painter.rect(at(x - WIDE, 0)[0], 0, 2 * WIDE * scale, height, { fill: paint.asphalt });
  }
  for (const x of near(columns.ramps)) {
    const corners = [[x - 60, RIGHT], [x - 50, RIGHT], [x - 4, bottom + 3.4], [x + 14, bottom], [x - 24, bottom]];
    painter.polygon(corners.map(([u, v]) => at(u, v)), { fill: paint.asphalt });
  }
  painter.rect(0, level(top - 1.7), width, (bottom - top + 3.4) * scale, { fill: paint.asphalt });
  const open = (x) => near(columns.crossings).some((one) => Math.abs(one - x) < WIDE + 1);
  for (let x = 6 * Math.floor(from / 6); x < to; x += 6) {
    if (open(x + 1.5)) continue;
    for (const y of lines.slice(1, -1)) painter.rect(at(x, 0)[0], level(y) - 1, 3 * scale, 2, { fill: paint.paint });
    for (const y of [top, bottom]) painter.rect(at(x, 0)[0], level(y) - 0.75, 6 * scale, 1.5, { fill: paint.paint });
  }
  for (const x of near(columns.zebras)) {
    for (let y = top + 0.25; y < bottom; y += 1) painter.rect(at(x - 1.5, 0)[0], level(y), 3 * scale, 0.5 * scale, { fill: paint.paint });
  }
}

// Draws a line from the ego vehicle to each object, wider for a larger weight.
function asked(painter, place, weights, look) {
  const [x0, y0] = place.at(place.ego.x, place.ego.y);
  for (const { n, x, y } of place.objects) {
    const share = stretch(weights?.[n] ?? 0, MOST, look.scale);
    if (share < 0.03) continue;
    const [x1, y1] = place.at(x, y);
    painter.curve(x0, y0, x1, y1, { stroke: look.colors.accent, line: 1 + 6 * share, opacity: 0.2 + 0.5 * share, bend: 0 });
  }
}

function object(painter, place, one, value, look) {
  const { colors } = look;
  const [x, y] = place.at(one.x, one.y);
  ahead(painter, place, one, colors.quiet);
  const strong = one.n === look.hover?.column || one.n === look.locked?.column || look.matches.columns.has(one.n);
  const share = stretch(value, MOST, look.scale);
  const fill = share < 0.02 ? ROAD[look.theme].body : tint(value, MOST, look.scale, look.theme);
  const style = { fill, stroke: strong ? colors.mark : colors.quiet, line: strong ? 3 : 1.25 };
  if (one.length < 1) painter.circle(x, y, Math.max(4, 0.45 * place.scale), style);
  else painter.polygon(body(x, y, one.turn, one.length * place.scale, Math.max(5, one.width * place.scale)), style);
}

function self(painter, place, look) {
  const { ego } = place;
  const [x, y] = place.at(ego.x, ego.y);
  ahead(painter, place, ego, look.colors.warm);
  const shape = body(x, y, ego.turn, OWN[0] * place.scale, OWN[1] * place.scale);
  painter.polygon(shape, { fill: look.colors.warm, stroke: look.colors.warm, line: 1 });
  const text = look.say("speedOf", { value: ego.speed.toFixed(1) });
  painter.text(text, x, y + 1.9 * place.scale, { size: 12, anchor: "middle", color: look.colors.warm, weight: 600 });
}

function ahead(painter, place, { x, y, turn, speed }, stroke) {
  if (!speed) return;
  const far = speed * SOON;
  const [[x0, y0], [x1, y1]] = [place.at(x, y), place.at(x + Math.cos(turn) * far, y + Math.sin(turn) * far)];
  painter.curve(x0, y0, x1, y1, { stroke, line: 2, bend: 0, dash: [3, 3] });
}

// Draws the labels of the attended objects. A label that would cover another one is moved above its object, or omitted.
function names(painter, place, model, look, weights) {
  const strong = (n) => n === look.hover?.column || n === look.locked?.column || look.matches.columns.has(n);
  const order = place.objects.filter(({ n }) => strong(n) || (weights?.[n] ?? 0) >= NAMED);
  order.sort((a, b) => strong(b.n) - strong(a.n) || weights[b.n] - weights[a.n]);
  const [egoX, egoY] = place.at(place.ego.x, place.ego.y);
  const taken = [{ x: egoX, y: egoY + 1.9 * place.scale, half: 26 }];
  for (const { n, x, y, turn, length, width } of order) {
    const [px, py] = place.at(x, y);
    const text = `${short(labelOf(model.columns, n), 18)}  ${(weights?.[n] ?? 0).toFixed(2)}`;
    const half = textWidth(text, 13, 600) / 2 + 3;
    const tall = Math.abs(Math.sin(turn)) * length + Math.abs(Math.cos(turn)) * width;
    const away = Math.max(6, (tall / 2) * place.scale) + 11;
    const free = (v) => taken.every((other) => Math.abs(other.x - px) > other.half + half || Math.abs(other.y - v) > 15);
    const level = [py - away, py + away].find((v) => v > 26 && v < place.height - 8 && free(v));
    if (level === undefined && !strong(n)) continue;
    taken.push({ x: px, y: level ?? py - away, half });
    painter.text(text, px, level ?? py - away, { size: 13, anchor: "middle", color: look.colors.text, weight: 600 });
  }
}

function body(x, y, turn, long, broad) {
  const [cos, sin] = [Math.cos(turn), Math.sin(turn)];
  const corners = [[-0.5, -0.5], [0.32, -0.5], [0.5, -0.25], [0.5, 0.25], [0.32, 0.5], [-0.5, 0.5]];
  return corners.map(([u, v]) => [x + u * long * cos - v * broad * sin, y + u * long * sin + v * broad * cos]);
}

function measure(painter, place, box, look) {
  const y = place.height - 14;
  painter.rect(box.x + 12, y, 10 * place.scale, 2, { fill: look.colors.quiet });
  painter.text(look.say("metres", { value: 10 }), box.x + 20 + 10 * place.scale, y, { size: 11, color: look.colors.quiet });
}
