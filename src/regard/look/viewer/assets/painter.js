// One drawing interface for canvases (screen and PNG) and for SVG text. Every picture is drawn through this interface,
// so a saved picture equals the displayed one.

import { FONTS } from "./format.js";

export class CanvasPainter {
  constructor(context) {
    this.context = context;
  }

  rect(x, y, width, height, { fill, stroke, line = 1, radius = 0, opacity = 1 } = {}) {
    const { context } = this;
    context.globalAlpha = opacity;
    context.beginPath();
    if (radius) context.roundRect(x, y, width, height, radius);
    else context.rect(x, y, width, height);
    this.finish(fill, stroke, line);
  }

  circle(x, y, radius, { fill, stroke, line = 1, opacity = 1, dash = [] } = {}) {
    const { context } = this;
    context.globalAlpha = opacity;
    context.setLineDash(dash);
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    this.finish(fill, stroke, line);
    context.setLineDash([]);
  }

  polygon(points, { fill, stroke, line = 1, opacity = 1, open = false } = {}) {
    const { context } = this;
    context.globalAlpha = opacity;
    context.beginPath();
    points.forEach(([x, y], n) => (n ? context.lineTo(x, y) : context.moveTo(x, y)));
    if (!open) context.closePath();
    this.finish(fill, stroke, line);
  }

  // An S-shaped curve from left to right; straight if `bend` is 0.
  curve(x0, y0, x1, y1, { stroke, line = 1, opacity = 1, bend = 0.45, dash = [] } = {}) {
    const { context } = this;
    const reach = (x1 - x0) * bend;
    context.globalAlpha = opacity;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + reach, y0, x1 - reach, y1, x1, y1);
    this.finish(null, stroke, line);
    context.setLineDash([]);
  }

  text(text, x, y, { size = 13, color, anchor = "start", weight = 400, turn = 0, opacity = 1 } = {}) {
    const { context } = this;
    context.globalAlpha = opacity;
    context.font = `${weight} ${size}px ${FONTS}`;
    context.textAlign = anchor === "middle" ? "center" : anchor;
    context.textBaseline = "middle";
    context.fillStyle = color;
    if (turn) {
      context.save();
      context.translate(x, y);
      context.rotate((turn * Math.PI) / 180);
      context.fillText(text, 0, 0);
      context.restore();
    } else context.fillText(text, x, y);
    context.globalAlpha = 1;
  }

  image(image, x, y, width, height, { smooth = true, opacity = 1 } = {}) {
    const { context } = this;
    context.globalAlpha = opacity;
    context.imageSmoothingEnabled = smooth;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, x, y, width, height);
    context.globalAlpha = 1;
  }

  clip(x, y, width, height, draw) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    draw();
    context.restore();
  }

  finish(fill, stroke, line) {
    const { context } = this;
    if (fill) {
      context.fillStyle = fill;
      context.fill();
    }
    if (stroke) {
      context.strokeStyle = stroke;
      context.lineWidth = line;
      context.stroke();
    }
    context.globalAlpha = 1;
  }
}

export class SvgPainter {
  constructor(width, height, title) {
    this.clips = 0;
    this.images = new Map(); // an SVG file embeds each image once, even if it is drawn several times
    this.parts = [
      `<svg xmlns="http://www.w3.org/2000/svg" width="${round(width)}" height="${round(height)}" ` +
        `viewBox="0 0 ${round(width)} ${round(height)}" font-family="${escape(FONTS)}" role="img">`,
      `<title>${escape(title)}</title>`,
    ];
  }

  rect(x, y, width, height, { fill, stroke, line = 1, radius = 0, opacity = 1 } = {}) {
    const rounded = radius ? ` rx="${radius}"` : "";
    this.add(`<rect ${box(x, y, width, height)}${rounded}`, { fill, stroke, line, opacity });
  }

  circle(x, y, radius, { fill, stroke, line = 1, opacity = 1, dash = [] } = {}) {
    this.add(`<circle cx="${round(x)}" cy="${round(y)}" r="${round(radius)}"`, { fill, stroke, line, opacity, dash });
  }

  polygon(points, { fill, stroke, line = 1, opacity = 1, open = false } = {}) {
    const list = points.map(([x, y]) => `${round(x)},${round(y)}`).join(" ");
    this.add(`<${open ? "polyline" : "polygon"} points="${list}"`, { fill, stroke, line, opacity });
  }

  curve(x0, y0, x1, y1, { stroke, line = 1, opacity = 1, bend = 0.45, dash = [] } = {}) {
    const reach = (x1 - x0) * bend;
    const places = [x0 + reach, y0, x1 - reach, y1, x1, y1].map(round).join(" ");
    this.add(`<path d="M${round(x0)} ${round(y0)}C${places}"`, { stroke, line, opacity, dash });
  }

  text(text, x, y, { size = 13, color, anchor = "start", weight = 400, turn = 0, opacity = 1 } = {}) {
    const turned = turn ? ` transform="rotate(${turn} ${round(x)} ${round(y)})"` : "";
    const bold = weight === 400 ? "" : ` font-weight="${weight}"`;
    const faint = opacity === 1 ? "" : ` opacity="${round(opacity)}"`;
    const place = anchor === "start" ? "" : ` text-anchor="${anchor}"`;
    this.parts.push(
      `<text x="${round(x)}" y="${round(y)}" font-size="${size}" fill="${color}" dominant-baseline="central"` +
        `${place}${bold}${faint}${turned}>${escape(text)}</text>`,
    );
  }

  image(image, x, y, width, height, { smooth = true, opacity = 1 } = {}) {
    if (!this.images.has(image)) this.embed(image);
    const crisp = smooth ? "" : ' style="image-rendering:pixelated"';
    const faint = opacity === 1 ? "" : ` opacity="${round(opacity)}"`;
    const [across, down] = [width / image.width, height / image.height].map((times) => Number(times.toPrecision(6)));
    const place = `translate(${round(x)} ${round(y)}) scale(${across} ${down})`;
    this.parts.push(`<use href="#${this.images.get(image)}" transform="${place}"${faint}${crisp}/>`);
  }

  embed(image) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    canvas.getContext("2d").drawImage(image, 0, 0);
    const name = `image${this.images.size}`;
    this.images.set(image, name);
    const size = `width="${image.width}" height="${image.height}"`;
    this.parts.push(`<defs><image id="${name}" ${size} href="${canvas.toDataURL("image/png")}"/></defs>`);
  }

  clip(x, y, width, height, draw) {
    const name = `clip${this.clips++}`;
    this.parts.push(
      `<clipPath id="${name}"><rect ${box(x, y, width, height)}/></clipPath>`,
      `<g clip-path="url(#${name})">`,
    );
    draw();
    this.parts.push("</g>");
  }

  add(start, { fill, stroke, line, opacity, dash = [] }) {
    const edge = stroke ? ` stroke="${stroke}" stroke-width="${round(line)}"` : "";
    const dashed = dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : "";
    const faint = opacity === 1 ? "" : ` opacity="${round(opacity)}"`;
    this.parts.push(`${start} fill="${fill ?? "none"}"${edge}${dashed}${faint}/>`);
  }

  toString() {
    return [...this.parts, "</svg>", ""].join("\n");
  }
}

// A picture with one pixel for each cell; `color(n)` returns [r, g, b] or [r, g, b, a] of cell n.
export function pixels(columns, rows, color) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.max(1, columns), Math.max(1, rows)];
  const context = canvas.getContext("2d");
  const data = context.createImageData(canvas.width, canvas.height);
  for (let n = 0; n < rows * columns; n++) {
    const [red, green, blue, alpha = 255] = color(n);
    data.data.set([red, green, blue, alpha], 4 * n);
  }
  context.putImageData(data, 0, 0);
  return canvas;
}

function escape(text) {
  // Replaces the characters that XML does not allow.
  const possible = String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "·");
  return possible.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

function box(x, y, width, height) {
  return `x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}"`;
}

function round(number) {
  return Math.round(number * 100) / 100;
}
