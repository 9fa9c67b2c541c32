// A slider over the rows of a map, and a button that shows the rows one after another.

import { el } from "./dom.js";
import { labelOf, short } from "./format.js";

const PACE = 200; // number of milliseconds for which each row of the map is shown

export class Player {
  // `frames()` returns the number of rows to play, or 0 if rows cannot be played; `show(row)` shows a row; `row()`
  // returns the current row.
  constructor({ frames, row, show, say, labels }) {
    Object.assign(this, { frames, row, show, say, labels, timer: null });
    this.button = el("button", { type: "button", "data-here": "play", onclick: () => this.toggle() });
    this.slider = el("input", {
      type: "range", min: "0", step: "1", "data-here": "time", oninput: () => this.show(Number(this.slider.value)),
    });
    this.label = el("output", { class: "quiet number" });
    this.element = el("div", { class: "player" }, this.button, this.slider, this.label);
  }

  refresh() {
    const count = this.frames();
    this.element.hidden = count < 2;
    this.slider.setAttribute("aria-label", this.say("time"));
    this.button.textContent = this.say("play");
    if (count < 2) return this.stop();
    this.slider.max = String(count - 1);
    this.slider.value = String(this.row());
    this.label.textContent = short(labelOf(this.labels(), this.row()), 40);
    this.button.textContent = this.say(this.timer === null ? "play" : "pause");
    return undefined;
  }

  toggle() {
    if (this.timer !== null) this.stop();
    else {
      if (this.row() >= this.frames() - 1) this.show(0);
      this.timer = setInterval(() => this.next(), PACE);
    }
    this.refresh();
  }

  next() {
    const row = this.row() + 1;
    if (!this.element.isConnected || row >= this.frames()) {
      this.stop();
      this.refresh();
    } else this.show(row);
  }

  stop() {
    if (this.timer !== null) clearInterval(this.timer);
    this.timer = null;
  }
}
