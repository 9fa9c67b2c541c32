// The viewer: `mount(element, sources, options)` inserts it into an element, for one source, or for two that are
// compared.

import { choice, el, replaced } from "./dom.js";
import { short } from "./format.js";
import { Stage, VIEWS } from "./stage.js";
import { remember, remembered, State } from "./state.js";
import { speaker } from "./strings.js";

export function mount(root, sources, options = {}) {
  const viewer = new Viewer(root, sources, options);
  root.viewer = viewer; // this property gives scripts of the embedding page access to the viewer
  viewer.render();
  viewer.stages.forEach((stage) => stage.load());
  return viewer;
}

export class Viewer {
  // options: title; language "en" or "zh"; theme "auto", "light" or "dark"; header false if the page has its own
  // header.
  constructor(root, sources, { title, language = "en", theme = "auto", header = true } = {}) {
    Object.assign(this, { root, header });
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    const chosen = header ? (remembered("theme") ?? theme) : theme;
    this.state = new State({
      language: (header && remembered("language")) || language, theme: chosen, shown: this.shown(chosen),
      sequence: 0, record: 0, head: 0, several: false, heads: [], shared: true, words: false, view: null, scale: null, cells: false, zoom: 1, hover: null, locked: null, query: "", match: 0,
    });
    this.title = title ?? sources.map((source) => source.about.title).join(" · ");
    this.stages = sources.map((source, index) => new Stage(this, source, index));
    this.state.on((changed) => this.heard(changed));
    this.dark.addEventListener("change", () => this.state.set({ shown: this.shown(this.state.get("theme")) }));
  }

  get say() {
    return speaker(this.state.get("language"));
  }

  shown(theme) {
    return theme === "auto" ? (this.dark.matches ? "dark" : "light") : theme;
  }

  heard(changed) {
    if (changed.has("theme")) {
      this.state.set({ shown: this.shown(this.state.get("theme")) });
      if (this.header) remember("theme", this.state.get("theme"));
    }
    if (changed.has("language") && this.header) remember("language", this.state.get("language"));
    if (["language", "theme", "shown"].some((name) => changed.has(name))) return this.render();
    if (changed.has("sequence")) {
      this.tools();
      this.stages.forEach((stage) => stage.turn());
    }
    // After a switch between words and sub-word pieces, the selected positions would refer to other tokens.
    if (changed.has("words")) this.state.set({ hover: null, locked: null });
    if (["shared", "several"].some((name) => changed.has(name))) this.stages.forEach((stage) => stage.overview.render());
    if (["record", "head", "several", "heads", "words"].some((name) => changed.has(name))) {
      this.stages.forEach((stage) => {
        stage.overview.mark();
        stage.load();
      });
    }
    if (changed.has("query")) this.search(0);
    if (["view", "scale", "cells", "zoom"].some((name) => changed.has(name))) {
      this.tools();
      this.stages.forEach((stage) => stage.refresh());
    } else if (["hover", "locked", "query"].some((name) => changed.has(name))) {
      this.stages.forEach((stage) => stage.follow());
    }
  }

  // Called when a stage (the part of the page for one trace) has loaded a head, because other views may be able to show
  // that head.
  loaded(stage) {
    if (this.state.get("query")) stage.find(this.state.get("query"));
    this.tools();
    this.stages.forEach((each) => each.refresh()); // the stages of all compared traces share one colour scale
  }

  render() {
    const { root, say, state } = this;
    root.classList.add("regard");
    root.dataset.theme = state.get("shown");
    root.lang = state.get("language") === "zh" ? "zh-CN" : "en";
    if (this.header) {
      document.documentElement.lang = root.lang;
      document.documentElement.dataset.theme = state.get("shown");
    }
    this.bar = el("div", { class: "tools", role: "toolbar", "aria-label": say("view") });
    const look = this.stages.length > 1 ? "stages two" : "stages";
    this.main = el("main", { class: look }, ...this.stages.map((stage) => stage.element));
    root.replaceChildren(...(this.header ? [this.top()] : []), this.bar, this.main);
    this.tools();
    this.stages.forEach((stage) => stage.render());
  }

  top() {
    const { say, state } = this;
    const languages = [{ value: "en", text: "English" }, { value: "zh", text: "中文" }];
    const themes = ["auto", "light", "dark"].map((value) => ({ value, text: say(value) }));
    return el("header", { class: "top" },
      el("h1", { text: this.title }),
      el("div", { class: "switches" },
        choice(say("language"), languages, state.get("language"), (language) => state.set({ language }), "language"),
        choice(say("theme"), themes, state.get("theme"), (theme) => state.set({ theme }), "theme")));
  }

  tools() {
    const { say, state } = this;
    const fit = VIEWS.filter((view) => this.stages.some((stage) => stage.views.includes(view)));
    const current = this.stages[0].model ? this.stages[0].view : VIEWS[0];
    const views = fit.map((view) => ({ value: view.name, text: say(view.name) }));
    const scales = ["linear", "root", "row"].map((value) => ({ value, text: say(current.veils && value === "row" ? "picture" : value) }));
    const sequences = this.sequences();
    this.field = el("input", {
      type: "search", "data-here": "search", placeholder: say("search"), "aria-label": say("search"), value: state.get("query"),
      oninput: () => state.set({ query: this.field.value }),
      onkeydown: (event) => event.key === "Enter" && this.search(event.shiftKey ? -1 : 1),
    });
    this.count = el("span", { class: "quiet number", role: "status" });
    replaced(this.bar,
      sequences.length > 1
        ? el("label", { class: "scale sequence" }, el("span", { class: "quiet", text: say("sequence") }), this.select("sequence", sequences))
        : "",
      choice(say("view"), views, current.name, (view) => state.set({ view }), "view"),
      el("label", { class: "scale" }, el("span", { class: "quiet", text: say("scale") }), this.select("scale", scales, this.stages[0].scale)),
      current.veils ? this.veils() : "",
      this.stages.some((stage) => stage.hasWords) || state.get("words") ? this.pieces() : "",
      current.zooms ? this.zooms() : "",
      el("div", { class: "find" }, this.field, this.count));
    this.counted();
  }

  // The entries of the menu of sequences; if two traces are compared, the sequences of the trace that has more of them.
  sequences() {
    const lists = this.stages.map((stage) => stage.about.sequences ?? []);
    const longest = lists.reduce((a, b) => (b.length > a.length ? b : a));
    return longest.map(({ number, text }, value) => {
      const shown = text ? this.say("sequenceOf", { number, text: short(text, 44) }) : String(number);
      return { value, text: shown };
    });
  }

  // The switch between whole words and sub-word pieces.
  pieces() {
    const kinds = ["pieces", "words"].map((value) => ({ value, text: this.say(value), title: this.say(`${value}Help`) }));
    const current = kinds[Number(this.state.get("words"))].value;
    return choice(this.say("tokens"), kinds, current, (kind) => this.state.set({ words: kind === "words" }), "words");
  }

  // The switch between interpolated weights and square cells in an overlay over a picture.
  veils() {
    const kinds = ["smooth", "cells"].map((value) => ({ value, text: this.say(value), title: this.say(`${value}Help`) }));
    const current = kinds[Number(this.state.get("cells"))].value;
    return choice(this.say("veil"), kinds, current, (kind) => this.state.set({ cells: kind === "cells" }), "veil");
  }

  select(name, choices, chosen = this.state.get(name)) {
    const options = choices.map(({ value, text }) => el("option", { value, text, selected: value === chosen }));
    const choose = () => this.state.set({ [name]: choices[list.selectedIndex].value });
    const list = el("select", { "data-here": name, "aria-label": this.say(name), onchange: choose }, ...options);
    return list;
  }

  zooms() {
    const button = (text, name, times) => {
      const label = this.say(name);
      const onclick = () => this.zoom(times);
      return el("button", { type: "button", "data-here": name, text, "aria-label": label, title: label, onclick });
    };
    const group = { class: "zoom", role: "group", "aria-label": this.say("zoom") };
    return el("div", group, button("−", "smaller", 0.5), button("+", "larger", 2));
  }

  zoom(times) {
    this.state.set({ zoom: Math.min(4096, Math.max(1, this.state.get("zoom") * times)) });
    const locked = this.state.get("locked");
    if (locked) this.stages.forEach((stage) => stage.picture.reveal(locked.row, locked.column));
  }

  // Marks the search results; with a step of 1 or −1, locks the next or the previous result.
  search(step) {
    const found = this.stages.map((stage) => stage.find(this.state.get("query")));
    this.found = found.find((places) => places.length) ?? [];
    if (!step) this.place = -1;
    else if (this.found.length) {
      this.place = ((this.place ?? -1) + step + this.found.length) % this.found.length;
      const place = this.found[this.place];
      this.state.set({ locked: place, hover: null });
      this.stages.forEach((stage) => stage.picture.reveal(place.row ?? stage.place("locked")?.row ?? 0, place.column));
    }
    this.counted();
  }

  counted() {
    const { say } = this;
    const count = this.found?.length ?? 0;
    const place = (this.place ?? -1) + 1;
    const found = count ? (place ? say("found", { place, count }) : String(count)) : say("none");
    this.count.textContent = this.state.get("query") ? found : "";
  }
}
