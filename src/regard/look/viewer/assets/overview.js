// The overview of all heads: a row of small maps for each layer, or a point for each head.

import { colorOf, headColor, MOST_HEADS } from "./colors.js";
import { choice, el } from "./dom.js";
import { headsOf } from "./facts.js";
import { compact, known } from "./format.js";
import { scaleBar } from "./heatmap.js";
import { measures, points } from "./measures.js";
import { Picture } from "./picture.js";
import { pixels } from "./painter.js";
import { huesOf } from "./several.js";

const ACROSS = 16; // largest number of heads' small maps in one row
const LONG = 40; // a name with more characters is laid out as a sentence, in a line of its own

export class Overview {
  constructor(stage) {
    this.stage = stage;
    this.element = el("section", { class: "overview" });
    this.kind = "maps";
    this.seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) this.paint(target);
    }, { rootMargin: "200px" });
  }

  // The weight of the darkest colour if all heads share a scale: 1, or the largest weight if it exceeds 1.
  get top() {
    return Math.max(1, ...this.stage.about.records.flatMap(({ thumbnails }) => thumbnails?.peaks ?? []));
  }

  get hasHeads() {
    return this.stage.about.records.some(({ heads }) => heads > 1);
  }

  render() {
    const { stage } = this;
    const { say, state, about } = stage;
    this.seen.disconnect();
    this.picture?.stop();
    this.picture = null;
    const heading = about.parts?.[state.get("language")] ?? about.parts?.en ?? say("overview");
    const kinds = measures.fits(about) && this.hasHeads ? ["maps", "measures"] : ["maps"];
    const options = kinds.map((value) => ({ value, text: say(value) }));
    const choose = (kind) => {
      this.kind = kind;
      this.render();
    };
    const shows = ["one", "colours"].map((value) => ({ value, text: say(value), title: say(`${value}Help`) }));
    const several = (value) => state.set(value === "one" ? { several: false } : { several: true, heads: this.first() });
    this.element.setAttribute("aria-label", heading);
    this.element.replaceChildren(
      el("div", { class: "line" },
        el("h2", { text: heading }),
        options.length > 1 ? choice(heading, options, this.kind, choose, `overview-${stage.index}`) : null),
      this.kind === "maps" ? this.grid(heading) : this.plot(),
      this.kind === "maps" ? this.scale() : "",
      this.hasHeads && this.kind === "maps"
        ? choice(say("headsShown"), shows, state.get("several") ? "colours" : "one", several, `several-${stage.index}`)
        : "",
    );
  }

  // The heads that are chosen when the display of several heads is switched on: all of them, up to the number of hues.
  first() {
    const { heads } = this.stage.about.records[this.stage.record];
    return Array.from({ length: Math.min(heads, MOST_HEADS) }, (_, head) => head);
  }

  grid(heading) {
    const { stage } = this;
    const { records, parts } = stage.about;
    const { names, say } = stage;
    const help = parts ? heading : say("overviewHelp");
    const grid = el("div", { class: "heads", role: "grid", "aria-label": help, onkeydown: (event) => this.press(event) });
    const most = Math.max(1, ...records.map((record) => record.heads));
    // The grid of small maps has one more column, for the mean of the heads.
    grid.style.setProperty("--across", Math.min(ACROSS, most) + (most > 1));
    grid.dataset.size = most <= 2 ? "large" : most <= 6 ? "medium" : "small";
    // Long names, which are sentences, are beside the maps if each layer has one map, otherwise above the maps. Names
    // of layers are always before their maps.
    const long = names.some((name) => name.length > LONG);
    if (parts || long) grid.dataset.list = most > 1 ? "above" : "beside";
    if (most > 1) grid.append(this.numbers(most));
    records.forEach((record, n) => {
      const name = el("span", { class: "name", role: "rowheader", text: names[n], title: record.name || names[n] });
      const cells = el("div", { class: "cells", role: "presentation" });
      const order = Array.from({ length: record.heads }, (_, head) => head);
      // the index after the last head stands for the mean of the heads
      if (record.heads > 1) order.unshift(record.heads);
      cells.append(...order.map((head) => this.cell(record, n, head, most)));
      grid.append(el("div", { class: "layer", role: "row" }, name, cells));
    });
    this.cells = grid;
    this.mark();
    return grid;
  }

  // The row of head numbers, above the small maps.
  numbers(most) {
    const head = (text) => el("span", { role: "columnheader", text });
    const cells = Array.from({ length: most > ACROSS ? 0 : most }, (_, n) => head(String(n)));
    return el("div", { class: "layer numbers", role: "row" }, head(""),
      el("div", { class: "cells", role: "presentation" }, head(this.stage.say("meanShort")), ...cells));
  }

  // The small map of a head. The map of a layer with one head is in the column of the means.
  cell(record, n, head, most) {
    const { say, names, state } = this.stage;
    const measure = (name) => (known(record[name]?.[head]) ? `, ${say(name)} ${compact(record[name][head])}` : "");
    const which = headsOf(record, [head], say);
    const label = (which ? say("layerHead", { name: names[n], which }) : names[n]) + measure("entropy") + measure("distance");
    const button = el("button", {
      type: "button", role: "gridcell", "data-record": n, "data-head": head, tabindex: "-1",
      "aria-label": label, title: label, onclick: () => this.choose(n, head),
    }, el("canvas", { "aria-hidden": "true" }));
    const isMean = record.heads > 1 && head === record.heads;
    button.classList.toggle("mean", isMean);
    button.style.gridColumn = String(isMean || record.heads === 1 ? 1 : 2 + (head % Math.min(ACROSS, most)));
    // If several heads are displayed in separate hues, the mean of the heads cannot be chosen, because it has no hue.
    if (isMean && state.get("several")) button.disabled = true;
    this.seen.observe(button);
    return button;
  }

  // Shows a head. If several heads are shown, adds this head to them or removes it.
  choose(record, head) {
    const { stage } = this;
    const { heads: count } = stage.about.records[record];
    if (!stage.state.get("several") || count === 1) {
      stage.state.set({ record, head: head === count && count > 1 ? "mean" : head });
      return;
    }
    const chosen = stage.state.get("heads");
    const isIn = chosen.includes(head);
    if (record !== stage.record) stage.state.set({ record, heads: isIn ? chosen : [...chosen, head].slice(-MOST_HEADS).sort((a, b) => a - b) });
    else if (!isIn) stage.state.set({ heads: [...chosen, head].slice(-MOST_HEADS).sort((a, b) => a - b) });
    else if (chosen.length > 1) stage.state.set({ heads: chosen.filter((other) => other !== head) });
  }

  async paint(button) {
    this.seen.unobserve(button);
    const { source, state } = this.stage;
    try {
      const grid = await source.thumbnail(Number(button.dataset.record), Number(button.dataset.head));
      const highest = state.get("shared") ? this.top : grid.highest;
      const shade = (n) => colorOf(grid.values[n], highest, "root", state.get("shown"));
      const small = pixels(grid.columns, grid.rows, shade);
      const canvas = button.querySelector("canvas");
      [canvas.width, canvas.height] = [small.width, small.height];
      canvas.getContext("2d").drawImage(small, 0, 0);
    } catch {
      button.classList.add("failed");
    }
  }

  // The legend of the small maps, with the switch between one colour scale for all heads and one for each head. The
  // colour depends on the square root of the weight.
  scale() {
    const { say, state } = this.stage;
    const shared = state.get("shared");
    const ends = shared ? [compact(this.top / 4), compact(this.top)] : ["¼", say("largestOfHead")];
    const kinds = ["shared", "own"].map((value) => ({ value, text: say(value), title: say(`${value}Help`) }));
    return el("div", { class: "small-scale" },
      el("div", { class: "ends" }, scaleBar(state.get("shown"), false),
        el("span", { text: "0" }), el("span", { text: ends[0] }), el("span", { text: ends[1] })),
      choice(say("scaleOfHeads"), kinds, shared ? "shared" : "own", (kind) => state.set({ shared: kind === "shared" }), `shared-${this.stage.index}`));
  }

  plot() {
    const { stage } = this;
    const { found } = points(stage.about);
    const readout = el("p", { class: "quiet", role: "status", text: "" });
    const tell = (point) => {
      if (!point) return;
      const { say } = stage;
      const which = headsOf(stage.about.records[point.record], [point.head], say);
      const name = which ? say("layerHead", { name: stage.names[point.record], which }) : stage.names[point.record];
      const values = { name, entropy: compact(point.entropy), distance: compact(point.distance ?? 0) };
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
        return measures.layout({ about: stage.about, names: stage.names }, look);
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

  // Marks the buttons of the chosen heads; only one button can be reached by the tab key.
  mark() {
    this.picture?.refresh();
    if (this.kind !== "maps" || !this.cells) return;
    const { stage } = this;
    const { heads } = stage;
    const hues = stage.about.records.length ? huesOf(heads, stage.about.records[stage.record].heads) : [];
    for (const button of this.cells.querySelectorAll("button")) {
      const { record, head } = button.dataset;
      const place = Number(record) === stage.record ? heads.indexOf(Number(head)) : -1;
      button.setAttribute("aria-selected", String(place >= 0));
      button.tabIndex = place === 0 ? 0 : -1;
      if (place >= 0 && heads.length > 1) button.style.setProperty("--ring", headColor(hues[place], stage.state.get("shown")));
      else button.style.removeProperty("--ring");
    }
  }

  // Arrow keys move between heads and layers; the mean of the heads comes before the first head.
  press(event) {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { records } = this.stage.about;
    const from = event.target.closest("[data-record]")?.dataset ?? { record: this.stage.record, head: this.stage.head };
    const record = Math.min(records.length - 1, Math.max(0, Number(from.record) + step[0]));
    const place = Number(from.head) === records[from.record].heads ? -1 : Number(from.head);
    const { heads } = records[record];
    const several = this.stage.state.get("several");
    const next = Math.min(heads - 1, Math.max(heads > 1 && !several ? -1 : 0, place + step[1]));
    if (!several) this.stage.state.set({ record, head: next < 0 ? "mean" : next });
    this.cells.querySelector(`[data-record="${record}"][data-head="${next < 0 ? heads : next}"]`)?.focus();
  }
}
