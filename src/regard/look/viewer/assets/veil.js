// Draws weights over a picture as a veil: a translucent overlay that is transparent at the largest weight and nearly
// opaque at weight 0.

import { colorOf, mostOf, stretch } from "./colors.js";
import { compact } from "./format.js";
import { pixels } from "./painter.js";

const THICK = 190; // opacity of the overlay at weight 0, where 255 is opaque
// The longer side of an overlay has at most this many pixels, and at least half as many; a grid with more cells has one
// pixel for each cell.
const SIDE = 144;
// A picture with a mean lightness below this gets a light overlay, because a dark overlay would be invisible.
const DARK = 0.3;
const means = new WeakMap(); // a cache of the mean colour of each picture
const veils = new WeakMap(); // a cache of the overlays of each head's data, by word and settings

// The overlay for one word: the word's weights over a grid of high × wide cells, as a picture.
export function veilOf(model, word, weights, { high, wide }, most, look) {
  if (!veils.has(model)) veils.set(model, new Map());
  const known = veils.get(model);
  const name = [word, most, look.scale, look.cells, look.theme].join("/");
  const kept = known.get(name);
  if (kept?.source === weights.buffer) return kept.veil;
  const size = Math.max(1, Math.floor(SIDE / Math.max(high, wide))); // side of a cell of the overlay, in pixels
  const spread = look.cells || size === 1 ? repeated(weights, high, wide, size) : interpolated(weights, high, wide, size);
  const shadow = shadowOf(model.picture);
  const odd = colorOf(NaN, most, look.scale, look.theme);
  const columns = wide * size;
  const cell = (n) => Math.floor(n / columns / size) * wide + Math.floor((n % columns) / size);
  const thickness = (n) => Math.round(THICK * (1 - stretch(spread[n], most, look.scale)));
  const veil = pixels(columns, high * size, (n) => (Number.isFinite(weights[cell(n)] ?? 0) ? [...shadow, thickness(n)] : [...odd, 220]));
  if (known.size > 1200) known.clear();
  known.set(name, { veil, source: weights.buffer });
  return veil;
}

// Draws the legend of the overlay: its opacity from weight 0 to the largest weight, over the picture's mean colour.
export function veilScale(painter, x, y, width, most, model, look) {
  const [mean, shadow] = [meanOf(model.picture), shadowOf(model.picture)];
  const bar = pixels(96, 1, (n) => {
    const thick = (THICK / 255) * (1 - stretch(n / 95, 1, look.scale));
    return mean.map((value, c) => Math.round(value + (shadow[c] - value) * thick));
  });
  painter.image(bar, x, y, width, 8);
  painter.rect(x, y, width, 8, { stroke: look.colors.line });
  const style = { size: 11, color: look.colors.quiet };
  painter.text("0", x, y + 18, style);
  painter.text(compact(most / 2), x + width / 2, y + 18, { ...style, anchor: "middle" });
  painter.text(compact(most), x + width, y + 18, { ...style, anchor: "end" });
}

// Interpolates the weights between the centres of the cells by cubic convolution (Keys 1981). At the centre of a cell
// the result is the cell's weight. Elsewhere it is limited to the range of the weights.
function interpolated(weights, high, wide, size) {
  const finite = Float32Array.from({ length: high * wide }, (_, n) => (Number.isFinite(weights[n]) ? Math.abs(weights[n]) : 0));
  const most = mostOf(finite);
  const [across, down] = [taps(wide, size), taps(high, size)];
  const columns = wide * size;
  const rows = new Float32Array(high * columns);
  for (let i = 0; i < high; i++) {
    across.forEach((tap, u) => (rows[i * columns + u] = tap.reduce((sum, [j, share]) => sum + share * finite[i * wide + j], 0)));
  }
  const spread = new Float32Array(columns * high * size);
  down.forEach((tap, v) => {
    for (let u = 0; u < columns; u++) {
      let sum = 0;
      for (const [i, share] of tap) sum += share * rows[i * columns + u];
      spread[v * columns + u] = Math.min(most, Math.max(0, sum));
    }
  });
  return spread;
}

// For each pixel along one side of the overlay: the four cells from which the pixel is interpolated, and their
// coefficients.
function taps(count, size) {
  return Array.from({ length: count * size }, (_, u) => {
    const place = (u + 0.5) / size - 0.5;
    const near = Math.floor(place);
    const t = place - near;
    const shares = [((2 - t) * t - 1) * t, (3 * t - 5) * t * t + 2, ((4 - 3 * t) * t + 1) * t, (t - 1) * t * t];
    return shares.map((share, n) => [Math.min(count - 1, Math.max(0, near + n - 1)), share / 2]);
  });
}

function repeated(weights, high, wide, size) {
  const columns = wide * size;
  return Float32Array.from({ length: columns * high * size }, (_, n) => {
    return weights[Math.floor(n / columns / size) * wide + Math.floor((n % columns) / size)] ?? 0;
  });
}

function shadowOf(picture) {
  const [red, green, blue] = meanOf(picture);
  const light = (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255;
  return light < DARK ? [226, 230, 238] : [18, 21, 28];
}

// The mean colour of a picture.
function meanOf(picture) {
  if (means.has(picture)) return means.get(picture);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [24, 24];
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, 24, 24);
  const { data } = context.getImageData(0, 0, 24, 24);
  const mean = [0, 1, 2].map((c) => data.reduce((sum, value, n) => (n % 4 === c ? sum + value : sum), 0) / 576);
  means.set(picture, mean);
  return mean;
}
