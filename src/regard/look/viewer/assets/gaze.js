// The view of a model that looks at an image in glimpses: their locations as a numbered path, and their patches.

import { labelOf, short, textWidth } from "./format.js";

const BADGE = 10; // radius of the circle around the number of a glimpse
const SIDE = 60; // side of a displayed patch, in pixels
const STEP = SIDE + 16; // distance in pixels between the entries of the list of glimpses
const MOST = 200; // largest number of listed glimpses

export const gaze = {
  name: "gaze",
  help: "gazeHelp",
  keys: "flow",
  fits: ({ rows, columns, picture }) =>
    rows?.kind === "glimpses" && columns?.kind === "patches" && picture !== null && rows.x?.length === rows.items.length,
  layout,
};

function layout(model, look) {
  const { rows, picture, sheet } = model;
  const ratio = picture.height / picture.width;
  const large = Math.round(Math.min(look.width - 8, 440, 440 / ratio));
  const count = Math.min(rows.items.length, MOST);
  const scales = sheet ? rows.sides?.length || 1 : 0;
  const listed = 34 + scales * (SIDE + 8) + 110;
  const apart = look.width - large - 32 > listed;
  const place = { count, scales, large, high: large * ratio, left: apart ? large + 32 : 4, top: apart ? 4 : large * ratio + 20 };
  place.at = (n) => [rows.x[n] * large, rows.y[n] * place.high];
  place.badges = badgesOf(place);
  place.crops = sheet ? cropsOf(model, place) : [];
  return {
    width: apart ? large + 32 + listed : Math.max(large + 4, listed),
    height: Math.max(place.high + 8, place.top + count * STEP),
    deepest: null,
    draw: (painter, box) => draw(painter, box, place, model, look),
    hit: (x, y) => hit(x, y, place),
    at: (row) => ({ x: place.left, y: place.top + row * STEP + SIDE / 2, left: 0, top: 0 }),
  };
}

// The positions of the glimpses' numbers: beside the glimpses' locations, without overlap.
function badgesOf({ count, at, large, high }) {
  const taken = [];
  for (let n = 0; n < count; n++) {
    const [x, y] = at(n);
    const free = ([u, v]) => taken.every(([a, b]) => Math.hypot(a - u, b - v) > 2 * BADGE + 1);
    const around = [];
    for (const far of [16, 32, 48, 64]) {
      for (let turn = 0; turn < 8; turn++) {
        const angle = ((turn - 1) * Math.PI) / 4;
        around.push([x + far * Math.cos(angle), y + far * Math.sin(angle)]);
      }
    }
    const inside = ([u, v]) => u > BADGE && v > BADGE && u < large - BADGE && v < high - BADGE;
    taken.push(around.find((place) => inside(place) && free(place)) ?? around.find(inside) ?? [x, y]);
  }
  return taken;
}

// The patches of each glimpse at each scale, cropped from the one picture in which all patches are stored, and cached.
function cropsOf(model, { scales }) {
  if (model.crops) return model.crops;
  const { sheet, rows } = model;
  const [wide, high] = [sheet.width / rows.items.length, sheet.height / scales];
  const crop = (n, scale) => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [wide, high];
    canvas.getContext("2d").drawImage(sheet, n * wide, scale * high, wide, high, 0, 0, wide, high);
    return canvas;
  };
  const shown = rows.items.slice(0, MOST);
  model.crops = shown.map((_, n) => Array.from({ length: scales }, (__, scale) => crop(n, scale)));
  return model.crops;
}

function hit(x, y, place) {
  const near = (points) => points.findIndex(([u, v]) => Math.hypot(u - x, v - y) <= BADGE + 2);
  const badge = near(place.badges);
  if (badge >= 0) return { row: badge, column: null };
  const spot = near(Array.from({ length: place.count }, (_, n) => place.at(n)));
  if (spot >= 0) return { row: spot, column: null };
  const row = Math.floor((y - place.top) / STEP);
  return x >= place.left && row >= 0 && row < place.count ? { row, column: null } : null;
}

function draw(painter, box, place, model, look) {
  const { colors } = look;
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  painter.image(model.picture, 0, 0, place.large, place.high, { smooth: model.picture.width > place.large });
  painter.rect(0, 0, place.large, place.high, { stroke: colors.line });
  painter.clip(0, 0, place.large, place.high, () => retina(painter, place, model, look));
  path(painter, place, look);
  for (let n = 0; n < place.count; n++) {
    const y = place.top + n * STEP;
    if (y < box.y + box.height && y + STEP > box.y) glimpse(painter, place, model, look, n, y);
  }
}

// Draws the outlines of the patches on the image: of the chosen glimpse at all scales, of other glimpses at the finest.
function retina(painter, place, { rows }, look) {
  const square = (n, share, style) => {
    const [[x, y], side] = [place.at(n), share * place.large];
    painter.rect(x - side / 2, y - side / 2, side, side, style);
  };
  const sides = rows.sides ?? [];
  for (let n = 0; n < place.count && sides.length; n++) square(n, sides[0], { stroke: look.colors.warm, opacity: 0.8 });
  if (look.active === null || look.active >= place.count) return;
  sides.forEach((share, scale) => square(look.active, share, { stroke: look.colors.warm, line: scale ? 1.5 : 3 }));
}

function path(painter, place, look) {
  const { colors } = look;
  const points = Array.from({ length: place.count }, (_, n) => place.at(n));
  // Two strokes, so that the line is visible on bright and on dark parts of an image.
  if (points.length > 1) {
    painter.polygon(points, { stroke: colors.page, line: 4, opacity: 0.8, open: true });
    painter.polygon(points, { stroke: colors.accent, line: 2, open: true });
  }
  points.forEach(([x, y], n) => {
    const [u, v] = place.badges[n];
    painter.curve(x, y, u, v, { stroke: colors.accent, line: 1, bend: 0 });
    painter.circle(x, y, 3.5, { fill: colors.accent, stroke: colors.page, line: 1 });
  });
  place.badges.forEach(([x, y], n) => badge(painter, x, y, n, look));
}

function badge(painter, x, y, n, look) {
  const { colors } = look;
  const isActive = n === look.active;
  painter.circle(x, y, BADGE, { fill: colors.page, stroke: isActive ? colors.warm : colors.accent, line: isActive ? 3 : 1.5 });
  painter.text(String(n), x, y + 0.5, { size: 12, color: colors.text, anchor: "middle", weight: 600 });
}

// An entry of the list of glimpses: the number, the patches from the finest scale to the coarsest, and the name.
function glimpse(painter, place, model, look, n, y) {
  const { colors, matches } = look;
  badge(painter, place.left + BADGE + 2, y + SIDE / 2, n, look);
  const left = place.left + 34;
  (place.crops[n] ?? []).forEach((patch, scale) => {
    const x = left + scale * (SIDE + 8);
    painter.image(patch, x, y, SIDE, SIDE, { smooth: false });
    const isActive = n === look.active;
    painter.rect(x, y, SIDE, SIDE, { stroke: isActive ? colors.warm : colors.line, line: isActive ? 2 : 1 });
  });
  const isMatch = matches.rows.has(n);
  const strong = n === look.active || isMatch;
  const text = short(labelOf(model.rows, n), 16);
  const x = left + place.scales * (SIDE + 8) + 4;
  const size = textWidth(text, 14, 600) > 100 ? 12 : 14;
  const color = isMatch ? colors.accent : colors.text;
  painter.text(text, x, y + SIDE / 2, { size, color, weight: strong ? 600 : 400 });
}
