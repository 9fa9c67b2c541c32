// The playground: the user's vectors and settings, and the three stages of attention (scores, weights, output).

import { choice, el } from "/page/dom.js";
import { delayed, json } from "./server.js";
import { show } from "./numbers.js";
import { plane } from "./plane.js";
import { stages } from "./stages.js";
import { editor } from "./vectors.js";
import { say } from "./words.js";

const SCORES = ["dot", "scaled_dot", "cosine", "bilinear", "additive"];
const NORMALIZERS = ["softmax", "sparsemax", "entmax", "sigmoid", "hard"];
const MASKS = ["none", "causal", "window", "padding"];
const MOST = 32;

// The worked example of the documentation: the query of the target word 汤姆, and the hidden states of the source words.
function tomAndJerry() {
  return {
    query: [{ name: "汤姆", numbers: [10, 5, 10] }],
    key: [{ name: "Tom", numbers: [5, 0, 1] }, { name: "chases", numbers: [0, 1, 1] }, { name: "Jerry", numbers: [1, 1, 0] }],
    value: null,
  };
}

function fresh() {
  return {
    input: "vectors", text: "Tom chases Jerry and Jerry chases Tom", ...tomAndJerry(), score: "scaled_dot", normalize: "softmax", temperature: 1,
    mask: { kind: "none", before: 1, after: 1, length: 2 }, heads: 1, head: 0, axes: [0, 1], selected: { row: 0, column: 0 }, answer: null,
  };
}

export async function open(place, kept) {
  kept.setup ??= fresh();
  const setup = kept.setup;
  const inputs = el("div", { class: "inputs card" });
  const controls = el("div", { class: "controls card" });
  const results = el("div", { class: "results", "aria-busy": "true" }, el("p", { class: "quiet", text: say("working") }));
  const failure = el("p", { class: "failure", role: "alert" });
  const spot = el("section", { class: "card arrows" });
  const code = el("div", { class: "code" });
  const words = el("div", { class: "scrolls" });
  let arrows = null;
  place.append(el("div", { class: "intro" }, el("h1", { text: say("playground") }), el("p", { text: say("playgroundHelp") })), controls, el("div", { class: "bench" }, inputs, el("div", { class: "right" }, failure, results, el("div", { class: "below" }, spot, code))));

  const compute = delayed(60, async (signal) => {
    results.setAttribute("aria-busy", "true");
    try {
      setup.answer = await json("/api/playground", { body: question(setup), signal });
      failure.textContent = "";
      setup.head = Math.min(setup.head, setup.heads - 1);
      drawResults();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      failure.textContent = say("error", { reason: error.message });
    }
    results.setAttribute("aria-busy", "false");
  });
  const embed = delayed(250, async (signal) => {
    try {
      const { tokens, vectors } = await json("/api/sentence", { body: { text: setup.text, size: 8 }, signal });
      const rows = tokens.map((name, n) => ({ name, numbers: vectors[n] }));
      Object.assign(setup, { query: rows, key: rows, value: null, selected: { row: 0, column: 0 } });
      drawWords();
      drawControls();
      compute(0);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      failure.textContent = say("error", { reason: error.message });
    }
  });
  const choose = (row, column) => {
    setup.selected = { row, column };
    drawResults();
  };

  function drawResults() {
    const { answer } = setup;
    const heads = setup.heads > 1
      ? choice(say("head"), Array.from({ length: setup.heads }, (_, n) => ({ value: String(n), text: say("headNumber", { n }) })), String(setup.head), (value) => { setup.head = Number(value); drawResults(); })
      : null;
    results.replaceChildren(...[heads, stages({ setup, answer, head: setup.head, selected: setup.selected, choose })].filter(Boolean));
    code.replaceChildren(...below(answer));
    const row = Math.min(setup.selected.row, setup.query.length - 1);
    arrows?.result(setup.heads === 1 ? answer.output[0][row] : null);
  }

  function drawInputs() {
    const modes = choice(say("input"), ["vectors", "sentence"].map((value) => ({ value, text: say(value) })), setup.input, (value) => {
      setup.input = value;
      setup.heads = 1;
      if (value === "vectors") Object.assign(setup, tomAndJerry(), { selected: { row: 0, column: 0 }, axes: [0, 1] });
      drawInputs();
      drawControls();
      if (value === "sentence") embed(0);
      else compute(0);
    });
    inputs.replaceChildren(el("div", { class: "row between" }, el("h2", { text: say("inputs") }), modes), ...(setup.input === "sentence" ? sentenceInputs() : vectorInputs()));
  }

  function sentenceInputs() {
    spot.hidden = true;
    arrows = null;
    const area = el("textarea", { id: "sentence", rows: 3, maxlength: 2000, spellcheck: "false", oninput: (event) => { setup.text = event.target.value; embed(); } });
    area.value = setup.text;
    drawWords();
    return [el("label", { for: "sentence", class: "small", text: say("sentenceLabel") }), area, el("p", { class: "quiet", text: say("sentenceHelp") }), words];
  }

  // Draws only the vectors again, so that the text field keeps the focus.
  function drawWords() {
    words.replaceChildren(editor({ kind: "key", title: say("vectors"), rows: setup.key.slice(0, 12), most: 0, changed: () => {}, readonly: true }));
  }

  function vectorInputs() {
    const size = setup.key[0].numbers.length;
    const all = () => [...setup.query, ...setup.key, ...(setup.value ?? [])];
    const again = () => {
      drawInputs();
      drawControls();
      compute();
    };
    const changed = () => {
      drawPlane();
      compute();
    };
    const add = (rows, name) => () => {
      rows.push({ name, numbers: Array.from({ length: size }, () => 1) });
      if (rows === setup.key && setup.value) setup.value.push({ name, numbers: Array.from({ length: size }, () => 1) });
      again();
    };
    const remove = (rows) => (n) => {
      rows.splice(n, 1);
      if (rows === setup.key) setup.value?.splice(n, 1);
      again();
    };
    const resize = (by) => {
      for (const row of all()) {
        if (by > 0) row.numbers.push(0);
        else row.numbers.pop();
      }
      setup.heads = 1;
      setup.axes = [0, Math.min(1, size + by - 1)];
      again();
    };
    const drawPlane = () => {
      spot.hidden = size < 2;
      if (spot.hidden) return;
      arrows = plane({
        arrows: [...setup.key.map((row) => ({ name: row.name, kind: "key", numbers: row.numbers })), ...setup.query.map((row) => ({ name: row.name, kind: "query", numbers: row.numbers }))],
        axes: setup.axes, choose: (axis, value) => { setup.axes[axis] = value; drawPlane(); },
        changed: (done) => {
          compute();
          if (done) drawInputs();
          else syncNumbers();
        },
      });
      spot.replaceChildren(el("h2", { text: say("arrows") }), arrows.element);
      if (setup.answer && setup.heads === 1) arrows.result(setup.answer.output[0][Math.min(setup.selected.row, setup.answer.output[0].length - 1)]);
    };
    const syncNumbers = () => {
      const shown = inputs.querySelectorAll(".vectors.query .vector, .vectors.key .vector");
      [...setup.query, ...setup.key].forEach((row, n) => shown[n]?.querySelectorAll("input.number").forEach((input, at) => { input.value = show(row.numbers[at]); }));
    };
    drawPlane();
    const same = el("label", { class: "check" }, el("input", {
      type: "checkbox", checked: !setup.value, onchange: (event) => {
        setup.value = event.target.checked ? null : setup.key.map(({ name, numbers }) => ({ name, numbers: [...numbers] }));
        again();
      },
    }), say("sameValues"));
    const button = (name, by, off) => el("button", { type: "button", text: by > 0 ? "+" : "−", title: say(name), "aria-label": say(name), disabled: off, onclick: () => resize(by) });
    return [
      editor({ kind: "query", title: say("queries"), rows: setup.query, most: MOST, changed, removed: remove(setup.query), added: add(setup.query, `q${setup.query.length}`) }),
      editor({ kind: "key", title: say("keys"), rows: setup.key, most: MOST, changed, removed: remove(setup.key), added: add(setup.key, `k${setup.key.length}`) }),
      setup.value ? editor({ kind: "value", title: say("values"), rows: setup.value, most: 0, changed }) : null,
      el("div", { class: "row between" }, same, el("span", { class: "row small" }, `${say("size")} ${size}`, button("shorter", -1, size <= 1), button("longer", 1, size >= MOST))),
      el("p", { class: "quiet", text: say("dragHelp") }),
      el("button", { type: "button", text: say("example"), title: say("exampleHelp"), onclick: () => { Object.assign(setup, fresh()); again(); } }),
    ].filter(Boolean);
  }

  function drawControls() {
    const size = setup.key[0].numbers.length;
    const divisors = Array.from({ length: size }, (_, n) => n + 1).filter((n) => size % n === 0);
    const picker = (name, values, current, put, text = say) => el("label", { class: "field" }, el("span", { text: say(name) }), el("select", {
      "data-name": name, onchange: (event) => { put(event.target.value); compute(0); },
    }, ...values.map((value) => el("option", { value, text: text(value), selected: String(value) === String(current) }))));
    const warmth = el("output", { text: show(setup.temperature) });
    const slider = el("input", {
      type: "range", min: -2, max: 2, step: 0.05, value: Math.log10(setup.temperature), "data-name": "temperature", "aria-valuetext": show(setup.temperature),
      oninput: (event) => {
        setup.temperature = Number((10 ** Number(event.target.value)).toPrecision(3));
        warmth.textContent = show(setup.temperature);
        event.target.setAttribute("aria-valuetext", show(setup.temperature));
        compute();
      },
    });
    const bound = (name) => el("label", { class: "field tight" }, el("span", { text: say(name) }), el("input", {
      type: "number", min: 0, max: MOST, value: setup.mask[name], "data-name": name,
      oninput: (event) => { setup.mask[name] = Math.max(0, Math.min(MOST, Math.round(Number(event.target.value) || 0))); compute(); },
    }));
    const extra = { none: [], causal: [], window: [bound("before"), bound("after")], padding: [bound("length")] }[setup.mask.kind];
    controls.replaceChildren(
      picker("score", SCORES, setup.score, (value) => { setup.score = value; }),
      picker("normalize", NORMALIZERS, setup.normalize, (value) => { setup.normalize = value; }),
      el("label", { class: "field wide" }, el("span", {}, `${say("temperature")} `, warmth), slider),
      picker("mask", MASKS, setup.mask.kind, (value) => { setup.mask.kind = value; drawControls(); controls.querySelector('[data-name="mask"]').focus(); }),
      ...extra,
      picker("heads", divisors, setup.heads, (value) => { setup.heads = Number(value); setup.head = 0; }, String),
    );
  }

  drawInputs();
  drawControls();
  if (setup.input === "sentence" && !setup.answer) embed(0);
  else compute(0);
  return () => {};
}

function question(setup) {
  const numbers = (rows) => rows.map((row) => row.numbers);
  return {
    query: numbers(setup.query), key: numbers(setup.key), value: setup.value && numbers(setup.value),
    score: setup.score, normalize: setup.normalize, temperature: setup.temperature, mask: setup.mask, heads: setup.heads,
  };
}

function below(answer) {
  const names = Object.entries(answer.parameters);
  const table = (rows) => el("table", { class: "numbers" }, ...(Array.isArray(rows[0]) ? rows : [rows]).map((line) => el("tr", {}, ...line.map((value) => el("td", { text: show(value, 2) })))));
  const copy = el("button", { type: "button", class: "quiet", text: say("copy"), onclick: async () => {
    await navigator.clipboard.writeText(answer.code);
    copy.textContent = say("copied");
  } });
  return [
    el("section", { class: "card" }, el("div", { class: "row between" }, el("h2", {}, say("code"), el("small", { text: say("backend", { backend: answer.backend }) })), copy), el("pre", {}, el("code", { text: answer.code }))),
    ...(names.length ? [el("details", { class: "card" }, el("summary", { text: say("learned") }), el("div", { class: "row top" }, ...names.map(([name, rows]) => el("div", {}, el("h3", { text: name }), table(rows)))))] : []),
  ];
}
