// Export of pictures and values: PNG, SVG, CSV, and the clipboard.

import { el } from "./dom.js";
import { labelOf, textWidth, visible } from "./format.js";
import { legend } from "./heatmap.js";
import { CanvasPainter, SvgPainter } from "./painter.js";
import { ranked } from "./source.js";

const EDGE = 24;
const LARGEST = 14000; // largest side of a canvas in pixels that every browser supports

// Draws the frame of a saved picture: the title and the check of the weights above the picture, the colour scale below
// it.
function framed(painter, layout, caption, look) {
  const { width, height } = frame(layout, caption, look);
  painter.rect(0, 0, width, height, { fill: look.colors.page });
  painter.text(caption.title, EDGE, EDGE + 6, { size: 17, color: look.colors.text, weight: 600 });
  painter.text(caption.subtitle, EDGE, EDGE + 30, { size: 12.5, color: look.colors.quiet });
  if (layout.deepest || look.parts) legend(painter, EDGE, height - EDGE - 24, 160, layout.deepest, look);
  return { x: EDGE, y: EDGE + 52 };
}

function frame(layout, caption, look) {
  const words = Math.max(textWidth(caption.title, 17, 600), textWidth(caption.subtitle, 12.5));
  const width = Math.ceil(Math.max(layout.width, words, 200) + 2 * EDGE);
  return { width, height: Math.ceil(layout.height + 2 * EDGE + (layout.deepest || look.parts ? 96 : 56)) };
}

class Shifted {
  // A painter whose origin is shifted by (x, y).
  constructor(painter, x, y) {
    const move = (name, places) => (...given) => {
      for (const n of places) given[n] += n % 2 ? y : x;
      return painter[name](...given);
    };
    this.rect = move("rect", [0, 1]);
    this.circle = move("circle", [0, 1]);
    this.curve = move("curve", [0, 1, 2, 3]);
    this.clip = move("clip", [0, 1]);
    this.text = (text, px, py, style) => painter.text(text, px + x, py + y, style);
    this.image = (image, px, py, ...rest) => painter.image(image, px + x, py + y, ...rest);
    this.polygon = (points, style) => painter.polygon(points.map(([px, py]) => [px + x, py + y]), style);
  }
}

function whole(painter, layout, caption, look) {
  const inside = framed(painter, layout, caption, look);
  const box = { x: 0, y: 0, width: layout.width, height: layout.height };
  layout.draw(new Shifted(painter, inside.x, inside.y), box);
}

export function asSvg(layout, caption, look) {
  const { width, height } = frame(layout, caption, look);
  const painter = new SvgPainter(width, height, caption.title);
  whole(painter, layout, caption, look);
  return new Blob([painter.toString()], { type: "image/svg+xml" });
}

export function asPng(layout, caption, look) {
  const { width, height } = frame(layout, caption, look);
  const ratio = Math.min(2, LARGEST / Math.max(width, height));
  const canvas = el("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  whole(new CanvasPainter(context), layout, caption, look);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// The map as a table with one line for each row. For a pooled map, a line has the largest weights of a row, which
// `rowOf(n)` fetches.
export async function asTable(model, separator, rowOf) {
  const { map } = model;
  const lines = [];
  if (map.rowBlock === 1 && map.columnBlock === 1) {
    lines.push(["", ...Array.from({ length: map.columns }, (_, j) => labelOf(model.columns, j))]);
    for (let i = 0; i < map.rows; i++) {
      const values = Array.from(map.values.subarray(i * map.columns, (i + 1) * map.columns), digits);
      lines.push([labelOf(model.rows, i), ...values]);
    }
  } else {
    lines.push(["row", "row label", "key", "key label", "weight"]);
    for (let i = 0; i < model.record.queries; i += model.record.pack?.stride ?? 1) {
      for (const { index, value } of ranked(await rowOf(i)).slice(0, 32)) {
        lines.push([i, labelOf(model.rows, i), index, labelOf(model.columns, index), digits(value)]);
      }
    }
  }
  return lines.map((cells) => cells.map((cell) => quoted(String(cell), separator)).join(separator)).join("\r\n");
}

export function asRow(model, row) {
  const lines = ranked(row).map(({ index, value }) => `${tidy(labelOf(model.columns, index))}\t${digits(value)}`);
  return ["key\tweight", ...lines].join("\n");
}

function digits(value) {
  return Number(value.toPrecision(5));
}

function tidy(text) {
  return visible(text).replaceAll("\t", " ");
}

// A label that begins like a formula is escaped, so that a spreadsheet does not evaluate it.
function quoted(cell, separator) {
  const harmless = /^[=+\-@\t\r]/.test(cell) && Number.isNaN(Number(cell)) ? `'${cell}` : cell;
  if (separator === "\t") return tidy(harmless);
  return /[",\r\n]/.test(harmless) ? `"${harmless.replaceAll('"', '""')}"` : harmless;
}

export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "away", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function fileName(...parts) {
  return parts.join(" ").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 80) || "attention";
}
