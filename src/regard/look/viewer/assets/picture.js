// An interactive picture: a canvas that shows the visible part of a drawing of any size.

import { el, whenResized } from "./dom.js";
import { CanvasPainter } from "./painter.js";

export class Picture {
  // `build(width)` returns a layout; `point(place)`, `choose(place)` and `press(key, layout)` are called when the user
  // moves the pointer, clicks or presses a key.
  constructor({ build, point, choose, press, scrolled = () => {} }) {
    Object.assign(this, { build, point, choose, press, scrolled });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.filler = el("div", { class: "filler" }, this.canvas);
    this.element = el("div", {
      class: "picture", tabindex: "0", role: "application",
      onscroll: () => this.draw(true),
      onpointermove: (event) => this.point(this.under(event)),
      onpointerleave: () => this.point(null),
      onclick: (event) => this.choose(this.under(event)),
      onkeydown: (event) => this.press(event.key, this.layout) && event.preventDefault(),
    }, this.filler);
    this.stop = whenResized(this.element, () => this.refresh());
  }

  // Computes the layout and draws the picture again, after a change of the data or of the width.
  refresh() {
    const width = this.element.clientWidth;
    if (!width) return;
    this.layout = this.build(width);
    if (!this.layout) return;
    // A map, whose labels stay at its edges, is scrolled inside a box of limited height, and so is a very high drawing.
    this.element.classList.toggle("held", Boolean(this.layout.held) || this.layout.height > 2400);
    this.filler.style.width = `${Math.ceil(this.layout.width)}px`;
    this.filler.style.height = `${Math.ceil(this.layout.height)}px`;
    // A canvas of the old size could overflow its element and show scrollbars, which would reduce the visible part.
    this.canvas.style.width = this.canvas.style.height = "0";
    this.draw(true);
  }

  // The visible part of the drawing, as a rectangle in the drawing's coordinates.
  get box() {
    const { scrollLeft: x, scrollTop: y, clientWidth, clientHeight } = this.element;
    const { width, height } = this.layout;
    const [wide, high] = [Math.ceil(width), Math.ceil(height)];
    return { x, y, width: Math.min(clientWidth, wide), height: Math.min(clientHeight || high, high) };
  }

  draw(moved = false) {
    if (!this.layout) return;
    const { box, canvas } = this;
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    const [wide, high] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    canvas.style.width = `${box.width}px`;
    canvas.style.height = `${box.height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, -box.x * ratio, -box.y * ratio);
    this.layout.draw(new CanvasPainter(context), box);
    if (moved) this.scrolled(this.layout, box);
  }

  under(event) {
    if (!this.layout) return null;
    const edge = this.canvas.getBoundingClientRect();
    const { box } = this;
    // Coordinates are rounded to whole pixels: browsers report clicks in whole pixels and moves in fractions, and both
    // must give the same cell.
    const [x, y] = [Math.floor(event.clientX) - edge.left, Math.floor(event.clientY) - edge.top];
    if (x < 0 || y < 0 || x > box.width || y > box.height) return null;
    return this.layout.hit(x + box.x, y + box.y, box);
  }

  // Scrolls as far as needed to show a position.
  reveal(row, column) {
    if (!this.layout?.at || row === null) return;
    const { x, y, left, top } = this.layout.at(row, column ?? 0);
    const { box, element } = this;
    if (y - 20 < box.y + top) element.scrollTop = y - top - 20;
    else if (y + 30 > box.y + box.height) element.scrollTop = y + 30 - box.height;
    if (column === null) return;
    if (x - 20 < box.x + left) element.scrollLeft = x - left - 20;
    else if (x + 20 > box.x + box.width) element.scrollLeft = x + 20 - box.width;
  }
}
