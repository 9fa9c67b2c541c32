// The page on which a run of any task answers inputs: fields for the inputs, the answer, its record, and the attention
// map. Answers of two runs can be compared.

import { el } from "/page/dom.js";
import { fields, filled } from "./inputs.js";
import { ask as fetched, delayed, json } from "./server.js";
import { fixed } from "./numbers.js";
import { shown } from "./shown.js";
import { say } from "./words.js";

// names of the settings of the displayed attention map that are kept for the next answer
const KEPT = ["view", "scale", "cells"];
const LONGEST = 24; // largest number of displayed items of a list in the record (JSON) of a prediction

export async function open(place, kept) {
  const { runs } = await json("/api/runs");
  const known = runs.map((run, number) => ({ ...run, number })).filter(({ inputs }) => inputs);
  place.append(el("div", { class: "intro" }, el("h1", { text: say("ask") }), el("p", { text: say("askHelp") })));
  if (!known.length) {
    place.append(el("div", { class: "card none" }, el("p", { text: say("noRuns") }), el("pre", { text: "regard demo\nregard studio RUN" })));
    return () => {};
  }
  const wanted = Number(location.hash.split("/")[2] || NaN);
  const setup = (kept.setup ??= { run: known[0].number, beside: null, values: {}, found: [], map: {}, begun: false });
  if (known.some(({ number }) => number === wanted) && wanted !== setup.from) Object.assign(setup, { run: wanted, from: wanted, found: [], begun: false });
  const run = () => known.find(({ number }) => number === setup.run);
  const others = () => known.filter((one) => one.number !== setup.run && shape(one) === shape(run()));
  const failure = el("p", { class: "failure", role: "alert" });
  const state = el("span", { class: "small", role: "status" });
  const form = el("form", { class: "card question", onsubmit: (event) => { event.preventDefault(); go(0); } });
  const answers = el("div", { class: "answers", "aria-live": "polite" });
  const map = el("div", { class: "map" });
  let leave = () => {};
  let asked = null; // the form with the input fields of the task
  let closed = false;
  place.append(form, answers, map);

  // The user's values are stored by the kinds of the inputs, so that another run with inputs of these kinds gets the
  // same values.
  function given() {
    const values = (setup.values[shape(run())] ??= {});
    for (const { name } of run().inputs) values[name] ??= run().example?.[name] ? { text: run().example[name] } : null;
    return values;
  }

  // Fetches the image or sound of the run's example, if it has one and the user has not given an input.
  async function fetchExample(anew = false) {
    const [one, values] = [run(), given()];
    const wanted = (one.files ?? []).filter((name) => anew || !values[name]);
    for (const name of wanted) {
      try {
        const blob = await (await fetched(`/api/runs/${one.number}/example/${encodeURIComponent(name)}`)).blob();
        if (anew || !values[name]) values[name] = await filled(blob, say("exampleOf", { name: one.name }));
      } catch (error) {
        failure.textContent = say("error", { reason: error.message });
      }
    }
    return wanted.length > 0;
  }

  // Replaces the inputs by the example of the run.
  async function useExample() {
    const one = run();
    for (const [name, text] of Object.entries(one.example ?? {})) given()[name] = { text };
    await fetchExample(true);
    if (closed || one !== run()) return;
    begin();
  }

  const whole = () => run().inputs.every(({ name }) => given()[name]?.text?.trim() || given()[name]?.data);

  const go = delayed(0, async (signal) => {
    failure.textContent = "";
    form.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
    if (!whole()) {
      failure.textContent = say("fillIn");
      return;
    }
    state.textContent = say("working");
    form.querySelector("[type=submit]").disabled = true;
    const inputs = Object.fromEntries(run().inputs.map(({ name }) => [name, given()[name].data ?? given()[name].text]));
    const found = [];
    try {
      for (const number of [setup.run, setup.beside].filter((one) => one !== null)) found.push(await one(number, inputs, signal));
    } finally {
      if (!signal.aborted) {
        state.textContent = "";
        form.querySelector("[type=submit]").disabled = false;
      }
    }
    const { error } = found.every((each) => each.error) ? found[0] : {};
    setup.found = error ? [] : found;
    setup.map = { values: setup.map.values && Object.fromEntries(KEPT.map((name) => [name, setup.map.values[name]])) };
    await draw();
    if (!error) return;
    failure.textContent = say("error", { reason: error });
    run().inputs.filter(({ name }) => error.startsWith(`${name} `)).forEach(({ name }) => form.querySelector(`[data-input="${CSS.escape(name)}"]`)?.setAttribute("aria-invalid", "true"));
  });

  // Returns the prediction of one run. The failure of one run does not affect the prediction of the other run.
  async function one(number, inputs, signal) {
    try {
      return { run: number, ...(await json("/api/ask", { body: { run: number, inputs }, signal })) };
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return { run: number, error: error.message };
    }
  }

  function ask() {
    const chosen = (number) => known.find((one) => one.number === number);
    const titled = (one) => `${one.name} · ${one.task}`;
    const select = (name, current, options, choose) => el("select", { "data-name": name, onchange: (event) => choose(event.target.value === "" ? null : Number(event.target.value)) },
      ...options.map(({ value, text }) => el("option", { value, text, selected: String(value) === String(current ?? "") })));
    const first = select("run", setup.run, known.map((one) => ({ value: one.number, text: titled(one) })), (number) => {
      Object.assign(setup, { run: number, found: [] });
      if (!others().some((one) => one.number === setup.beside)) setup.beside = null;
      begin();
    });
    const second = select("compare", setup.beside, [{ value: "", text: say("nobody") }, ...others().map((one) => ({ value: one.number, text: titled(one) }))], (number) => {
      setup.beside = number;
      begin();
    });
    asked = fields(run().inputs, given(), () => go(0));
    const hasExample = run().example || run().files?.length;
    const example = hasExample ? el("button", { type: "button", "data-name": "example", text: say("useExample"), onclick: useExample }) : "";
    const field = (text, input) => el("label", { class: "field" }, el("span", { text }), input);
    const waiting = [setup.run, setup.beside].filter((number) => number !== null && !chosen(number).ready);
    form.replaceChildren(
      el("div", { class: "row choose" }, field(say("run"), first), others().length ? field(say("compareWith"), second) : "", el("a", { class: "small", href: `#/runs/${setup.run}`, text: say("runPage") })),
      ...waiting.map((number) => el("p", { class: "notice", role: "status", text: say("notReady", { name: chosen(number).name }) })),
      asked,
      failure,
      el("div", { class: "row" }, el("button", { type: "submit", class: "primary", text: say("askButton") }), example, el("span", { class: "small", text: keys(run().inputs) }), state),
    );
  }

  function begin() {
    failure.textContent = "";
    ask();
    draw();
    if (run().ready && whole()) go(0);
    else start();
  }

  // Fetches the image or sound of the run's example if it is missing, and requests the run's prediction for the
  // example.
  async function start() {
    const one = run();
    if (!(await fetchExample()) || closed || one !== run()) return;
    ask();
    if (one.ready && whole()) go(0);
  }

  async function draw() {
    leave();
    leave = () => {};
    const { found } = setup;
    answers.classList.toggle("two", found.length === 2);
    answers.replaceChildren(...found.map((one) => answer(one, known.find(({ number }) => number === one.run))));
    const traces = found.filter(({ trace }) => trace).map(({ trace }) => trace);
    map.replaceChildren();
    if (!traces.length) return;
    const stage = el("div");
    map.append(el("h2", { text: say("whereLooked") }), stage);
    try {
      const stop = await shown(stage, traces[0], setup.map, null, traces[1] ?? null, false);
      if (closed) stop();
      else leave = stop;
    } catch (error) {
      stage.replaceChildren(el("p", { class: "failure", text: say("error", { reason: error.message }) }));
    }
  }

  ask();
  if (setup.begun) draw();
  else if (run().ready && whole()) go(0);
  else start();
  setup.begun = true;
  const paste = (event) => asked.paste(event);
  document.addEventListener("paste", paste);
  return () => {
    closed = true;
    document.removeEventListener("paste", paste);
    leave();
  };
}

function shape({ inputs }) {
  return inputs.map(({ name, kind }) => `${name}:${kind}`).join(" ");
}

function keys(inputs) {
  if (!inputs.some(({ kind }) => kind === "text" || kind === "scene")) return "";
  return say(inputs.some(({ kind, long }) => long || kind === "scene") ? "askKeysLong" : "askKeys");
}

function answer({ answer: text, record, trace, error }, { name }) {
  if (error) return el("section", { class: "answer card", "aria-label": name }, el("h2", { text: name }), el("p", { class: "failure", role: "alert", text: say("error", { reason: error }) }));
  const sure = ["probability", "score"].filter((key) => Number.isFinite(record[key])).slice(0, 1);
  const written = JSON.stringify(record, null, 2);
  const copy = el("button", { type: "button", text: say("copy"), onclick: async () => {
    await navigator.clipboard?.writeText(written);
    copy.textContent = say("copied");
  } });
  return el(
    "section", { class: "answer card", "aria-label": name },
    el("h2", { text: name }),
    el("p", { class: "said", text: text || say("emptyAnswer") }),
    ...sure.map((key) => el("p", { class: "sure" }, say(key === "score" ? "scoreOf" : "chance"), " ", el("strong", { class: "number", text: fixed(record[key], 2) }))),
    trace ? "" : el("p", { class: "quiet", text: say("noMap") }),
    el("details", {}, el("summary", { text: say("record") }), el("div", { class: "row" }, copy), el("pre", { tabindex: 0, text: brief(record) })),
  );
}

// Returns a record as text for display: a list of plain values is on one line, and a long list is truncated. A copied
// record is complete.
function brief(value, indent = "") {
  if (value === null || typeof value !== "object") return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const entries = Array.isArray(value) ? value.map((entry) => ["", entry]) : Object.entries(value).map(([key, entry]) => [`${JSON.stringify(key)}: `, entry]);
  const few = Array.isArray(value) ? entries.slice(0, LONGEST) : entries;
  const cut = entries.length > few.length ? [`… ${say("moreEntries", { count: entries.length - few.length })}`] : [];
  const plain = Array.isArray(value) && few.every(([, entry]) => entry === null || typeof entry !== "object");
  const inner = `${indent}  `;
  const lines = [...few.map(([key, entry]) => key + brief(entry, inner)), ...cut];
  if (!lines.length || plain) return open + lines.join(", ") + close;
  return `${open}\n${lines.map((line) => inner + line).join(",\n")}\n${indent}${close}`;
}
