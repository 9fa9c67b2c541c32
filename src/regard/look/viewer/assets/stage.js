// The part of the page that shows one trace: its heads, the picture of the chosen head, and the current token.

import { headColor, mostOf, palette } from "./colors.js";
import { el } from "./dom.js";
import { checkOf, factsOf, headsOf, readoutOf, storedOf, titleOf } from "./facts.js";
import { labelOf, namesOf } from "./format.js";
import { gaze } from "./gaze.js";
import { heatmap, scaleBar, scaleEnds } from "./heatmap.js";
import { image } from "./image.js";
import { lines } from "./lines.js";
import { best, modelOf } from "./model.js";
import { Overview } from "./overview.js";
import { Picture } from "./picture.js";
import { Playback } from "./playback.js";
import { Player } from "./player.js";
import { road } from "./road.js";
import { asPng, asRow, asSvg, asTable, copy, download, fileName } from "./save.js";
import { scene } from "./scene.js";
import { huesOf, meanMap, meanOf, meanRow } from "./several.js";
import { sound } from "./sound.js";
import { speaker } from "./strings.js";
import { text } from "./text.js";
import { TokenList } from "./token.js";
import { byWords, sentenceOf, wordsOf } from "./words.js";

export const VIEWS = [heatmap, lines, text, gaze, image, sound, road, scene];
// Specialised views: the first of them that can show a record is its default.
const OWN = [gaze, image, sound, road, scene];
const COLOURED = [heatmap, lines, text]; // views that can show several heads at once, each in its own hue
const PATIENCE = 50; // time in milliseconds without a move of the pointer or a scroll after which more data is fetched
const STEPS = {
  ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity,
};

export class Stage {
  constructor(viewer, source, index) {
    Object.assign(this, { viewer, source, index, state: viewer.state, about: source.about, model: null });
    this.matches = { rows: new Set(), columns: new Set() };
    this.element = el("section", { class: "stage" });
    this.bitmaps = new Map(); // a cache of the decoded images of those labels that have an image
    this.overview = new Overview(this);
    this.token = new TokenList(this);
    this.playback = new Playback(() => this.follow());
    this.player = new Player({
      frames: () => (this.model && this.view.frames ? this.view.frames(this.model) : 0),
      row: () => this.active ?? 0, labels: () => this.model.rows, say: (...words) => this.say(...words),
      show: (row) => this.state.set({ locked: { row, column: this.place("locked")?.column ?? null }, hover: null }),
    });
    this.picture = new Picture({
      build: (width) => this.model && this.view.layout(this.model, this.look(width)),
      point: (place) => this.state.set({ hover: place }),
      choose: (place) => this.lock(place),
      press: (key) => this.press(key),
      scrolled: (layout, box) => this.sharpen(layout, box),
    });
  }

  get say() {
    return this.viewer.say;
  }

  get record() {
    return Math.min(this.state.get("record"), this.about.records.length - 1);
  }

  // The index of the displayed head. The index after the last head is the mean of all heads, which a record with one
  // head does not have.
  get head() {
    const { heads } = this.about.records[this.record];
    const head = this.state.get("head");
    return head === "mean" ? heads - (heads === 1) : Math.min(head, heads - 1);
  }

  // The indices of all displayed heads: more than one only if the display of several heads is switched on.
  get heads() {
    const { heads } = this.about.records[this.record];
    if (!this.state.get("several") || heads === 1) return [this.head];
    const chosen = this.state.get("heads").filter((head) => head < heads);
    return chosen.length ? chosen : [0];
  }

  get names() {
    return namesOf(this.about.records, this.say);
  }

  get name() {
    return this.names[this.record];
  }

  // Whether some words of the displayed record consist of several sub-word pieces, and all its weights are loaded.
  get hasWords() {
    const { rows, columns } = this.about.records[this.record] ?? {};
    return Boolean(this.model?.whole) && [rows, columns].some((place) => wordsOf(this.about.labels[place]));
  }

  // The views that can show this record.
  get views() {
    if (!this.model) return [heatmap];
    return VIEWS.filter((view) => view.fits(this.model) && (!this.model.parts || COLOURED.includes(view)));
  }

  get view() {
    const { views } = this;
    const asked = this.state.get("view");
    const usual = this.model?.parts ? lines : heatmap;
    return views.find((view) => (asked ? view.name === asked : OWN.includes(view))) ?? usual;
  }

  // The name of the scale from weights to colours: the user's choice, or the default of the view.
  get scale() {
    return this.state.get("scale") ?? this.view.scale ?? "linear";
  }

  // The position (row, column) that the selection stores under a name; null if it does not exist in this trace.
  place(name) {
    const place = this.state.get(name);
    if (!place || !this.model) return null;
    const { queries, keys } = this.model.record;
    const row = place.row !== null && place.row < queries ? place.row : null;
    const column = place.column !== null && place.column < keys ? place.column : null;
    return row === null && column === null ? null : { row, column };
  }

  get active() {
    return this.place("hover")?.row ?? this.place("locked")?.row ?? (this.model?.record.queries === 1 ? 0 : null);
  }

  get activeColumn() {
    return this.place("hover")?.column ?? this.place("locked")?.column ?? (this.model?.same ? this.active : null);
  }

  // The weight of the darkest colour. All traces that are compared share it, so that a colour means the same weight.
  get highest() {
    const of = ({ model }) => Math.max(model?.highest ?? 0, model?.tile?.highest ?? 0);
    return Math.max(...this.viewer.stages.map(of));
  }

  look(width) {
    const theme = this.state.get("shown");
    const shared = { width, theme, colors: palette(theme), say: this.say, scale: this.scale };
    if (!this.model) return shared;
    const { active } = this;
    const chosen = active === null ? null : this.model.weights(active);
    return {
      ...shared, active, zoom: this.state.get("zoom"), cells: this.state.get("cells"), hover: this.place("hover"), locked: this.place("locked"), time: this.playback.time,
      matches: this.matches, highest: this.highest, rowHighest: this.model.parts && active !== null ? Math.max(...(this.model.partsOf(active) ?? [[]]).map(mostOf)) : mostOf(chosen),
      negative: this.model.negative, odd: this.model.odd, parts: this.model.parts,
    };
  }

  // Shows another sequence of the batch. A response that arrives after the user has chosen yet another one is ignored.
  async turn() {
    const wanted = this.state.get("sequence");
    try {
      const source = await this.source.sequence(Math.min(wanted, this.about.sequences.length - 1));
      if (wanted !== this.state.get("sequence") || source === this.source) return;
      Object.assign(this, { source, about: source.about, model: null });
    } catch (error) {
      this.fail(error);
      return;
    }
    this.bitmaps.clear();
    // in another sequence, the selected positions would belong to other words
    this.state.set({ hover: null, locked: null });
    this.render();
    this.load();
  }

  // Fetches the chosen heads, then shows them. A response that arrives after the user has chosen other heads is
  // ignored.
  async load() {
    if (!this.about.records.length) return;
    const [at, heads, { source }] = [this.record, this.heads, this];
    const here = () => at === this.record && String(heads) === String(this.heads) && source === this.source;
    try {
      const record = this.about.records[at];
      const [rows, columns] = [record.rows, record.columns].map((place) => this.about.labels[place] ?? null);
      const [found, picture, sheet] = await Promise.all([
        Promise.all(heads.map((head) => Promise.all([source.map(at, head), source.received(at, head)]))),
        this.bitmap(columns?.picture ? record.columns : record.rows),
        // The picture that contains the patches of all glimpses.
        this.bitmap(rows?.kind === "glimpses" ? record.rows : null),
      ]);
      if (!here()) return;
      this.model = modelOf({ ...this.shown(record, heads, found, rows, columns), picture, sheet }, {
        ask: (row) => this.ask(at, heads, row), arrived: () => this.refresh(), failed: (error) => this.fail(error),
      });
    } catch (error) {
      if (here()) this.fail(error);
      return;
    }
    this.viewer.loaded(this);
  }

  // The fetched data in the form that the views need: merged into words if whole words are chosen, and averaged if
  // several heads are chosen.
  shown(record, heads, found, rows, columns) {
    const whole = found.every(([map]) => map.rowBlock === 1 && map.columnBlock === 1);
    const merges = this.state.get("words") && whole && (wordsOf(rows) || wordsOf(columns));
    const each = found.map(([map, received]) => (merges ? byWords({ record, map, rows, columns }) : { record, map, received, rows, columns }));
    if (each.length === 1) return each[0];
    const hues = huesOf(heads, record.heads);
    const parts = each.map(({ map, received }, n) => ({ head: heads[n], hue: hues[n], map, received }));
    return { ...each[0], map: meanMap(parts.map(({ map }) => map)), received: meanOf(parts.map(({ received }) => received)), parts };
  }

  // Fetches one row of a map. From a server, it is fetched only once the pointer rests, except for views with a picture
  // of each row, which need all rows at once.
  async ask(record, heads, row) {
    if (this.source.finer && !OWN.includes(this.view)) {
      await new Promise((done) => setTimeout(done, PATIENCE));
      if (this.active !== row) return null;
    }
    const found = await Promise.all(heads.map((head) => this.source.rows(record, head, row)));
    return found.length > 1 ? meanRow(found, this.about.records[record].keys) : found[0];
  }

  async bitmap(place) {
    if (!this.about.labels[place]?.picture) return null;
    const fetched = () => this.source.picture(place).then((blob) => blob && createImageBitmap(blob));
    if (!this.bitmaps.has(place)) this.bitmaps.set(place, fetched());
    return this.bitmaps.get(place);
  }

  // For a pooled map, fetches the visible part at a higher resolution, unless almost the whole map is visible.
  async sharpen(layout, box) {
    const { model } = this;
    if (!this.source.finer || !layout.wanted || !model || model.whole || model.parts) return;
    const { row0, column0, rows, columns } = layout.wanted(box);
    if (rows < 1 || columns < 1 || (rows > model.record.queries * 0.9 && columns > model.record.keys * 0.9)) {
      model.tile = null;
      return;
    }
    const wanted = `${row0}/${column0}/${rows}/${columns}`;
    this.wanted = wanted;
    await new Promise((done) => setTimeout(done, PATIENCE));
    const current = () => this.wanted === wanted && this.model === model;
    if (!current()) return;
    try {
      const tile = await this.source.tile(this.record, this.head, row0, column0, rows, columns);
      if (!current()) return;
      model.tile = tile;
      this.follow();
    } catch (error) {
      this.fail(error);
    }
  }

  // Locks a position, so that it stays selected without the pointer; locking the same position again removes the lock.
  lock(place) {
    if (!place) return;
    const old = this.state.get("locked");
    const next = { row: place.row ?? old?.row ?? null, column: place.column };
    const again = old && old.row === next.row && old.column === next.column;
    this.state.set({ locked: again ? null : next });
  }

  press(key) {
    const { model, view } = this;
    if (!model) return false;
    if (key === "Escape") {
      this.state.set({ locked: null, hover: null });
      return true;
    }
    if (view.zooms && ["+", "=", "-"].includes(key)) {
      this.viewer.zoom(key === "-" ? 0.5 : 2);
      return true;
    }
    const next = this.step(key);
    if (!next) return false;
    this.state.set({ locked: next, hover: null });
    this.picture.reveal(next.row, view.keys === "flow" ? null : next.column);
    return true;
  }

  // The position that a key press locks (selects permanently): in a heat map, arrow keys move the position along rows
  // and columns; in other views, from token to token.
  step(key) {
    const { queries, keys } = this.model.record;
    const { row = null, column = null } = this.place("locked") ?? {};
    if (!(key in STEPS)) return null;
    const down = row === null ? 0 : clamp(row + STEPS[key], queries);
    const right = column === null ? 0 : clamp(column + STEPS[key], keys);
    if (this.picture.layout?.axis === "column") return { row: null, column: right };
    if (this.view.keys === "flow") return { row: down, column };
    if (row === null) return { row: 0, column: column ?? 0 };
    if (column === null) return { row, column: best(this.model.weights(row)) };
    return ["ArrowLeft", "ArrowRight", "Home", "End"].includes(key) ? { row, column: right } : { row: down, column };
  }

  // Searches the labels for a text; returns the positions of the matches, those in the rows first.
  find(query) {
    this.matches = { rows: new Set(), columns: new Set() };
    const wanted = query.trim().toLocaleLowerCase();
    if (!wanted || !this.model) return [];
    const { rows, columns, record, same } = this.model;
    const search = (labels, count, found) => {
      for (let n = 0; n < count; n++) if (labelOf(labels, n).toLocaleLowerCase().includes(wanted)) found.add(n);
    };
    search(rows, record.queries, this.matches.rows);
    search(columns, record.keys, this.matches.columns);
    const inRows = Array.from(this.matches.rows, (row) => ({ row, column: null }));
    const inColumns = Array.from(this.matches.columns, (column) => ({ row: null, column }));
    return same ? inRows : [...inRows, ...inColumns];
  }

  // Creates all elements, at the start and after a change of language.
  render() {
    const { say } = this;
    const several = this.viewer.stages.length > 1;
    const trace = several ? el("h2", { class: "trace", text: this.about.title }) : "";
    if (!this.about.records.length) {
      this.element.replaceChildren(trace, el("p", { class: "quiet", text: say("empty") }), this.dropped());
      return;
    }
    this.readout = el("p", { class: "readout", role: "status", "aria-live": "polite" });
    this.title = el("h2");
    this.facts = el("p", { class: "facts" });
    this.sentences = el("dl", { class: "sentences" });
    this.notes = el("div", { class: "notes" });
    this.legend = el("div", { class: "legend" });
    this.kept = el("div", { class: "notes" });
    const alone = this.about.records.length === 1 && this.about.records[0].heads === 1;
    this.element.classList.toggle("alone", alone);
    this.overview.render();
    const head = el("section", { class: "head", "aria-label": say("view") },
      el("div", { class: "line" }, this.title, this.buttons()),
      this.facts, this.sentences, this.notes, this.readout, this.playback.element, this.picture.element, this.player.element, this.legend, this.kept);
    this.element.replaceChildren(trace, alone ? "" : this.overview.element, head, this.token.element, this.dropped());
    this.refresh();
  }

  buttons() {
    const { say } = this;
    const button = (kind, title, onclick) =>
      el("button", { type: "button", "data-save": kind, text: say(kind), title: say(title), onclick });
    this.told = el("p", { class: "told", role: "status" });
    return el("div", { class: "save", role: "group", "aria-label": say("save") },
      button("copy", "copyHelp", () => this.copy()),
      button("png", "savePng", () => this.save("png")),
      button("svg", "saveSvg", () => this.save("svg")),
      button("csv", "saveCsv", () => this.save("csv")),
      this.told);
  }

  dropped() {
    const { dropped } = this.about;
    if (!dropped.length) return el("div", { class: "dropped" });
    return el("details", { class: "dropped", open: dropped.length < 4 },
      el("summary", { text: `${this.say("dropped")} (${dropped.length})` }),
      el("ul", {}, ...dropped.map((sentence) => el("li", { text: sentence }))));
  }

  // Draws the current heads again after a change of settings.
  refresh() {
    if (!this.title || !this.model) return;
    const { say, model, view, heads, name } = this;
    const { record } = model;
    this.title.replaceChildren(...titleOf(name, record, heads, say));
    this.facts.replaceChildren(...factsOf(record, heads.length > 1 ? -1 : heads[0], name, say));
    this.sentences.replaceChildren(...this.texts());
    const own = record.kind === "rollout" ? say("rolloutHelp") : model.parts ? say("severalHelp") : null;
    const notes = [record.note, own, view.help ? say(view.help) : null].filter(Boolean);
    this.notes.replaceChildren(...notes.map((note) => el("p", { text: note })));
    this.kept.replaceChildren(...storedOf(model, this.source.finer, say).map((note) => el("p", { text: note })));
    const { queries, keys } = record;
    const which = headsOf(record, heads, say);
    const label = say("pictureOf", { view: say(view.name), name: which ? say("layerHead", { name, which }) : name, queries, keys });
    this.picture.element.setAttribute("aria-label", label);
    this.picture.element.dataset.view = view.name;
    this.overview.mark();
    this.playback.show(view.plays ? (model.columns?.sound ?? null) : null, say);
    this.picture.refresh();
    this.tell();
  }

  // The sentences of the rows and of the columns as running text, because the labels in a map are shortened and far
  // apart.
  texts() {
    const { say, model } = this;
    const sides = model.same ? [["sentence", model.rows]] : [["queries", model.rows], ["keys", model.columns]];
    return sides.flatMap(([name, labels]) => {
      const text = labels?.items.length > 1 ? sentenceOf(labels) : null;
      return text ? [el("dt", { text: say(name) }), el("dd", { text })] : [];
    });
  }

  // Updates the page after the pointer has moved, or a position was locked or unlocked.
  follow() {
    if (!this.model || !this.title) return;
    const width = this.picture.element.clientWidth;
    this.picture.layout = width ? this.picture.build(width) : null;
    this.picture.draw();
    this.tell();
  }

  // Updates the texts beside the picture: the position under the pointer or the locked one, the legend, and the list of
  // the current token's weights.
  tell() {
    const hover = this.place("hover");
    const place = hover ?? this.place("locked");
    if (!place) this.readout.replaceChildren(el("span", { class: "quiet", text: this.say("hint") }));
    else {
      const locked = hover ? "" : el("span", { class: "quiet", text: this.say("locked") });
      this.readout.replaceChildren(...readoutOf(this.model, place, this.view.name, this.say), locked);
    }
    const deepest = this.picture.layout?.deepest;
    this.legend.hidden = !deepest && !this.model.parts;
    if (!this.legend.hidden) {
      const look = this.look(0);
      const [low, high] = scaleEnds(deepest, look.negative, look);
      const strange = look.odd ? [el("span", { class: "odd" }), el("span", { text: "NaN, ±∞" })] : [];
      const bar = scaleBar(look.theme, look.negative);
      const own = this.model.parts ? this.keysOfHeads() : [el("span", { text: low }), bar, el("span", { text: high })];
      this.legend.replaceChildren(...own, ...strange);
    }
    this.player.refresh();
    this.token.render();
  }

  // The legend that shows the hue of each head.
  keysOfHeads() {
    return this.model.parts.map(({ head, hue }) => {
      const square = el("span", { class: "hue" });
      square.style.background = headColor(hue, this.state.get("shown"));
      return el("span", { class: "key" }, square, this.say("head", { head }));
    });
  }

  async save(kind) {
    const { model, say, view } = this;
    if (!model) return;
    const { record } = model;
    const { sequence, sequences } = this.about;
    const which = sequences.length > 1 || sequence ? `sequence ${sequence}` : "";
    const heads = headsOf(record, this.heads, speaker("en"));
    const layer = namesOf(this.about.records, speaker("en"))[this.record];
    const name = fileName(this.about.title, layer, which, heads, kind === "csv" ? "" : view.name);
    if (kind === "csv") {
      const values = await asTable(model, ",", (row) => this.source.rows(this.record, this.head, row));
      download(new Blob(["\ufeff", values], { type: "text/csv;charset=utf-8" }), `${name}.csv`);
      return;
    }
    const active = this.place("locked")?.row ?? (record.queries === 1 ? 0 : null);
    const look = { ...this.look(Math.max(640, this.picture.element.clientWidth)), hover: null, active };
    const caption = {
      title: [this.name === "·" ? this.about.title : this.name, headsOf(record, this.heads, say)].filter(Boolean).join(" · "),
      subtitle: `${this.about.title} · ${checkOf(record, say)}`,
    };
    const paint = kind === "png" ? asPng : asSvg;
    download(await paint(view.layout(model, look), caption, look), `${name}.${kind}`);
  }

  // Copies the weights of the locked row or, if no row is locked, of the whole map.
  async copy() {
    const row = this.place("locked")?.row ?? null;
    const rowOf = (place) => (this.model.whole ? this.model.rowOf(place) : this.source.rows(this.record, this.head, place));
    const values = row === null ? await asTable(this.model, "\t", rowOf) : asRow(this.model, await rowOf(row));
    this.told.textContent = this.say((await copy(values)) ? "copied" : "cannotCopy");
    setTimeout(() => (this.told.textContent = ""), 2500);
  }

  fail(error) {
    this.readout?.replaceChildren(el("span", { class: "bad", text: this.say("failed", { reason: error.message }) }));
  }
}

function clamp(place, count) {
  return Math.min(count - 1, Math.max(0, place));
}
