// All heads at once: a row of small maps for each layer, or a point for each head.

import { colorOf } from "./colors.js";
import { choice, el } from "./dom.js";
import { compact, known, shortNames } from "./format.js";
import { measures, points } from "./measures.js";
import { Picture } from "./picture.js";
import { pixels } from "./painter.js";

export class Overview {
  constructor(stage) {
    this.stage = stage;
    this.element = el("section", { class: "overview" });
    this.kind = "maps";
    this.names = shortNames(stage.about.records);
    this.seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) this.paint(target);
    }, { rootMargin: "200px" });
  }

  render() {
    const { stage } = this;
    const { say } = stage;
    this.seen.disconnect();
    this.picture?.stop();
    this.picture = null;
    const kinds = measures.fits(stage.about) ? ["maps", "measures"] : ["maps"];
    const options = kinds.map((value) => ({ value, text: say(value) }));
    const choose = (kind) => {
      this.kind = kind;
      this.render();
    };
    this.element.setAttribute("aria-label", say("overview"));
    this.element.replaceChildren(
      el("div", { class: "line" },
        el("h2", { text: say("overview") }),
        options.length > 1 ? choice(say("overview"), options, this.kind, choose, `overview-${stage.index}`) : null),
      this.kind === "maps" ? this.grid() : this.plot(),
    );
  }

  grid() {
    const { stage, names } = this;
    const { records } = stage.about;
    const help = stage.say("overviewHelp");
    const grid = el("div", { class: "heads", role: "grid", "aria-label": help, onkeydown: (event) => this.press(event) });
    const most = Math.max(1, ...records.map((record) => record.heads));
    grid.style.setProperty("--across", Math.min(16, most));
    grid.dataset.size = most <= 2 ? "large" : most <= 6 ? "medium" : "small";
    records.forEach((record, n) => {
      const name = el("span", { class: "name", role: "rowheader", text: names[n], title: record.name || names[n] });
      const cells = el("div", { class: "cells", role: "presentation" });
      for (let head = 0; head < record.heads; head++) cells.append(this.cell(record, n, head));
      grid.append(el("div", { class: "layer", role: "row" }, name, cells));
    });
    this.cells = grid;
    this.mark();
    return grid;
  }

  cell(record, n, head) {
    const { say } = this.stage;
    const measure = (name) => (known(record[name]?.[head]) ? `, ${say(name)} ${compact(record[name][head])}` : "");
    const [measured, far] = [measure("entropy"), measure("distance")];
    const label = say("layerHead", { name: record.name || this.names[n], head: head + 1 }) + measured + far;
    const button = el("button", {
      type: "button", role: "gridcell", "data-record": n, "data-head": head, tabindex: "-1",
      "aria-label": label, title: label,
      onclick: () => this.stage.state.set({ record: n, head }),
    }, el("canvas", { "aria-hidden": "true" }));
    this.seen.observe(button);
    return button;
  }

  async paint(button) {
    this.seen.unobserve(button);
    const { source, state } = this.stage;
    try {
      const grid = await source.thumbnail(Number(button.dataset.record), Number(button.dataset.head));
      const shade = (n) => colorOf(grid.values[n], grid.highest, "linear", state.get("shown"));
      const small = pixels(grid.columns, grid.rows, shade);
      const canvas = button.querySelector("canvas");
      [canvas.width, canvas.height] = [small.width, small.height];
      canvas.getContext("2d").drawImage(small, 0, 0);
    } catch {
      button.classList.add("failed");
    }
  }

  plot() {
    const { stage } = this;
    const { found } = points(stage.about);
    const readout = el("p", { class: "quiet", role: "status", text: "" });
    const tell = (point) => {
      if (!point) return;
      const { say } = stage;
      const [name, head] = [this.names[point.record], point.head + 1];
      const values = { name, head, entropy: compact(point.entropy), distance: compact(point.distance ?? 0) };
      readout.textContent = say("measuresOf", values) + (point.distance === null ? "" : say("farOf", values));
    };
    const go = (point) => {
      if (!point) return;
      stage.state.set({ record: point.record, head: point.head });
      tell(point);
    };
    const current = () => found.findIndex((point) => point.record === stage.record && point.head === stage.head);
    this.picture = new Picture({
      build: (width) => {
        const look = { ...stage.look(width), record: stage.record, head: stage.head };
        return measures.layout({ about: stage.about, names: this.names }, look);
      },
      point: (place) => place && tell(found[place.row]),
      choose: (place) => place && go(found[place.row]),
      press: (key) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
        if (step) go(found[Math.min(found.length - 1, Math.max(0, current() + step))]);
        return Boolean(step);
      },
    });
    this.picture.element.setAttribute("aria-label", stage.say("measures"));
    tell(found[current()]);
    return el("div", { class: "measures" }, this.picture.element, readout);
  }

  // Show which head is chosen; it alone is in the order of the Tab key.
  mark() {
    this.picture?.refresh();
    if (this.kind !== "maps" || !this.cells) return;
    for (const button of this.cells.querySelectorAll("button")) {
      const { record, head } = button.dataset;
      const chosen = Number(record) === this.stage.record && Number(head) === this.stage.head;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  }

  press(event) {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { records } = this.stage.about;
    const record = Math.min(records.length - 1, Math.max(0, this.stage.record + step[0]));
    const head = Math.min(records[record].heads - 1, Math.max(0, this.stage.head + step[1]));
    this.stage.state.set({ record, head });
    this.cells.querySelector(`[data-record="${record}"][data-head="${head}"]`)?.focus();
  }
}
