// The list of one token's weights: bars for the keys that the token attends to, or for the queries that attend to it.

import { headColor, mostOf, stretch, tint } from "./colors.js";
import { choice, el, replaced } from "./dom.js";
import { labelOf, short, visible, weight } from "./format.js";
import { ranked } from "./source.js";

const SHOWN = 12;

export class TokenList {
  constructor(stage) {
    this.stage = stage;
    this.direction = "looksAt";
    this.element = el("section", { class: "token" });
  }

  render() {
    const { stage } = this;
    const { say, model } = stage;
    if (!model) return this.element.replaceChildren();
    const options = ["looksAt", "lookedAt"].map((value) => ({ value, text: say(value) }));
    const choose = (direction) => {
      this.direction = direction;
      this.render();
    };
    const whole = model.map.rowBlock === 1 && model.map.columnBlock === 1;
    const direction = whole ? this.direction : "looksAt";
    const place = direction === "looksAt" ? stage.active : stage.activeColumn;
    const labels = direction === "looksAt" ? model.rows : model.columns;
    if (place === null) return this.received();
    const name = labelOf(labels, place);
    this.element.setAttribute("aria-label", say(direction));
    replaced(this.element,
      el("div", { class: "line" },
        el("h3", { text: `“${short(name, 32)}”`, title: visible(name) }),
        el("span", { class: "quiet", text: say("position", { place }) })),
      whole
        ? choice(say("direction"), options, direction, choose, `direction-${stage.index}`)
        : el("span", { class: "quiet", text: say("looksAt") }),
      this.list(direction, place),
    );
  }

  // Shows the tokens that receive the most weight, while no token is chosen.
  received() {
    const { say, model } = this.stage;
    this.element.setAttribute("aria-label", say("most"));
    const target = (index) => (model.same ? { row: index, column: null } : { row: null, column: index });
    const row = { indices: null, values: model.received, rest: 0, error: 0.00004 };
    replaced(this.element,
      el("h3", { text: say("most") }), el("span", { class: "quiet", text: say("mostHelp") }),
      this.bars(row, model.columns, model.record.keys, target, model.parts?.map((part) => part.received)));
  }

  list(direction, place) {
    const { model } = this.stage;
    const looks = direction === "looksAt";
    const row = looks ? model.rowOf(place) : columnOf(model, place);
    const target = (index) => (looks ? { row: place, column: index } : { row: index, column: place });
    const each = !model.parts ? null : looks ? model.partsOf(place) : model.parts.map((part) => columnOf(part, place).values);
    return this.bars(row, looks ? model.columns : model.rows, looks ? model.record.keys : model.record.queries, target, each);
  }

  // Creates the list of bars. If several heads are shown, `each` has the weights of each head, and a bar consists of
  // one part for each head, in the head's hue.
  bars(row, labels, total, target, each = null) {
    const { stage } = this;
    const list = el("ol", { class: "bars" });
    if (!row) return list;
    const pairs = ranked(row);
    const shown = pairs.slice(0, SHOWN);
    const most = mostOf(shown.map(({ value }) => value)) || 1;
    for (const { index, value } of shown) {
      const bar = el("span", { class: each ? "bar parts" : "bar" });
      bar.style.width = `${100 * stretch(value, most, "linear")}%`;
      each?.forEach((values, n) => {
        const part = el("span");
        part.style.flexGrow = String(Math.abs(values[index]));
        part.style.background = headColor(stage.model.parts[n].hue, stage.state.get("shown"));
        bar.append(part);
      });
      // a non-finite or negative weight has a full bar in a separate hue
      const strange = Number.isFinite(value) ? (value < 0 ? -0.7 : null) : NaN;
      if (strange !== null) bar.style.background = tint(strange, 1, "linear", stage.state.get("shown"));
      const name = labelOf(labels, index);
      const button = el("button", { type: "button", "data-here": index, onclick: () => stage.lock(target(index)) },
        el("span", { class: "label", text: short(name, 28), title: visible(name) }),
        el("span", { class: "track", "aria-hidden": "true" }, bar),
        el("span", { class: "number", text: weight(value, row.error, most) }));
      list.append(el("li", { "data-index": index }, button));
    }
    const rest = pairs.slice(SHOWN).reduce((sum, { value }) => sum + value, 0) + row.rest;
    const count = total - shown.length;
    if (count > 0) {
      const number = el("span", { class: "number", text: weight(rest, row.error, most) });
      list.append(el("li", { class: "quiet rest" }, el("span", { text: stage.say("rest", { count }) }), number));
    }
    return list;
  }
}

function columnOf(model, column) {
  const { map } = model;
  const values = new Float32Array(map.rows);
  for (let i = 0; i < map.rows; i++) values[i] = map.values[i * map.columns + column];
  return { indices: null, values, rest: 0, error: map.error };
}
