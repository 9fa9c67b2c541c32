// The section "translate" of the studio: the source text can be edited, a target word can be forced, and two runs can
// be compared.

import { el } from "/page/dom.js";
import { short } from "/page/format.js";
import { alignment } from "./alignment.js";
import { delayed, json } from "./server.js";
import { cells } from "./cells.js";
import { charts } from "./chart.js";
import { fixed } from "./numbers.js";
import { say } from "./words.js";

export async function open(place, kept) {
  const { runs, toys } = await json("/api/runs");
  kept.setup ??= { text: "The big dog saw a small cat yesterday", beams: 4, runs: [runs.findIndex(({ translates }) => translates), null], forced: [[], []], chosen: [{}, {}] };
  const setup = kept.setup;
  const failure = el("p", { class: "failure", role: "alert" });
  const agreed = el("p", { class: "quiet", "aria-live": "polite" });
  const answers = el("div", { class: "answers" });
  const found = [null, null];
  const stops = [];

  const translate = delayed(200, async (signal) => {
    try {
      for (const side of [0, 1]) {
        found[side] = setup.runs[side] === null ? null : await json("/api/translate", { body: { run: setup.runs[side], text: setup.text, beams: setup.beams, forced: setup.forced[side] }, signal });
        if (found[side] && (setup.chosen[side].beam ?? 0) >= found[side].beams.length) setup.chosen[side].beam = 0;
      }
      failure.textContent = "";
      draw();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      failure.textContent = say("error", { reason: error.message });
    }
  });

  const field = (name, input, more = "") => el("label", { class: `field ${more}` }, el("span", { text: say(name) }), input);
  const picker = (side, options) => el("select", {
    "data-name": side ? "compare" : "run",
    onchange: (event) => {
      setup.runs[side] = event.target.value === "" ? null : Number(event.target.value);
      setup.forced[side] = [];
      translate(0);
    },
  }, ...options.map(({ value, text }) => el("option", { value, text, selected: String(setup.runs[side] ?? "") === String(value) })));
  const names = runs.map(({ name, translates }, value) => ({ value, text: name, translates })).filter(({ translates }) => translates);
  const source = el("input", {
    type: "text", value: setup.text, maxlength: 2000, spellcheck: "false", autocomplete: "off", "data-name": "source",
    oninput: (event) => {
      setup.text = event.target.value;
      // the words that the user forced belong to the translation of the previous text, so they are removed
      setup.forced = [[], []];
      setup.chosen = [{}, {}];
      if (setup.text.trim()) translate();
    },
  });
  const beams = el("input", { type: "number", min: 1, max: 16, value: setup.beams, "data-name": "beams", oninput: (event) => {
    setup.beams = Math.max(1, Math.min(16, Math.round(Number(event.target.value) || 1)));
    translate();
  } });
  place.append(
    el("div", { class: "intro" }, el("h1", { text: say("translate") }), el("p", { text: say("translateHelp") })),
    el("div", { class: "controls card" }, field("source", source, "source"), field("run", picker(0, names)), field("compareWith", picker(1, [{ value: "", text: say("nobody") }, ...names])), field("beams", beams, "tight")),
    toys ? el("p", { class: "quiet", text: say("toyHelp") }) : "", failure, agreed, answers,
  );

  function draw() {
    stops.splice(0).forEach((stop) => stop());
    const both = found.filter(Boolean).length === 2;
    answers.classList.toggle("two", both);
    answers.replaceChildren(...[0, 1].filter((side) => found[side]).map((side) => answer(side, both)));
    agreed.textContent = both ? agreement(found.map((one, side) => one.beams[setup.chosen[side].beam ?? 0] ?? { tokens: [], weights: [] }), found.map(({ source }) => source)) : "";
  }

  function answer(side, both) {
    const { source: words, beams: list } = found[side];
    const chosen = setup.chosen[side];
    const beam = list[chosen.beam ?? 0] ?? { tokens: [], weights: [], alternatives: [] };
    const other = both ? found[1 - side].beams[setup.chosen[1 - side].beam ?? 0] : null;
    const pick = (word) => {
      chosen.word = chosen.word === word ? undefined : word;
      draw();
      answers.children[side]?.querySelectorAll("button.word")[word]?.focus();
    };
    const force = (tokens) => {
      setup.forced[side] = tokens;
      setup.chosen[side] = { beam: 0, word: tokens.length ? tokens.length - 1 : undefined };
      translate(0);
    };
    const drawn = alignment({ source: words, beam, chosen: chosen.word, forced: setup.forced[side].length, other, pick });
    stops.push(drawn.stop);
    const table = beam.tokens.length
      ? el("div", { class: "table" }, el("h2", { text: say("weightsOf") }), cells({ values: beam.weights, rows: beam.tokens, columns: words, text: (value) => fixed(value, 2).replace(/^0/, ""), share: (value) => value, selected: chosen.word === undefined ? null : { row: chosen.word, column: best(beam.weights[chosen.word]) }, choose: (row) => { chosen.word = row; draw(); }, label: `${say("weightsOf")} ${side}` }))
      : "";
    return el(
      "section", { class: "answer card", "data-side": side, "aria-label": runs[setup.runs[side]].name },
      el("div", { class: "row between" }, el("h2", {}, runs[setup.runs[side]].name, el("small", { text: say("linesHelp") })), forcedChip(side, force)),
      drawn.element, el("div", { class: "lower" }, hypotheses(list, chosen), instead(beam, chosen.word, force), table), judged(side, beam, chosen.word),
    );
  }

  // Shows the faithfulness of the chosen word's alignment: the server evaluates the run again without some source
  // words.
  function judged(side, beam, word) {
    const run = setup.runs[side];
    if (!runs[run].scores || word === undefined || word >= beam.tokens.length) return "";
    const spot = el("div", { "aria-live": "polite" });
    json("/api/faithfulness", { body: { run, text: setup.text, target: beam.tokens, place: word } }).then(
      (answer) => spot.replaceChildren(charts(answer, say("faithfulWord", { word: beam.tokens[word] }))),
      (error) => spot.replaceChildren(el("p", { class: "failure", text: say("error", { reason: error.message }) })),
    );
    return spot;
  }

  function forcedChip(side, force) {
    const words = setup.forced[side];
    return words.length ? el("span", { class: "row small" }, say("forced", { words: words.join(" ") }), el("button", { type: "button", class: "quiet", text: say("release"), onclick: () => force([]) })) : "";
  }

  function hypotheses(list, chosen) {
    return el("div", {}, el("h2", { text: say("hypotheses") }), el("ol", { class: "beams" }, ...list.map((beam, n) => el("li", {}, el("button", {
      type: "button", class: "beam", "aria-pressed": String(n === (chosen.beam ?? 0)), onclick: () => { chosen.beam = n; chosen.word = undefined; draw(); },
    }, el("span", { text: beam.tokens.join(" ") || say("emptyTarget") }), el("span", { class: "number", text: `${say("logProb")} ${fixed(beam.logProb, 2)}` }))))));
  }

  function instead(beam, word, force) {
    if (word === undefined || word >= beam.tokens.length) return el("div", {}, el("h2", { text: say("otherWords") }), el("p", { class: "quiet", text: say("chooseWord") }));
    const before = beam.tokens.slice(0, word);
    const field = el("input", { type: "text", class: "plain", maxlength: 100, placeholder: say("forceOther"), "aria-label": say("forceOther"), autocomplete: "off" });
    return el(
      "div", { class: "instead" }, el("h2", { text: say("alternatives", { word: beam.tokens[word] }) }),
      el("ul", { class: "others" }, ...beam.alternatives[word].slice(0, 6).map(({ token, probability }) => {
        const bar = el("span", { class: "bar" });
        bar.style.width = `${100 * probability}%`;
        return el("li", {}, el("button", { type: "button", title: say("force"), onclick: () => force([...before, token]) }, el("span", { text: short(token, 20) }), el("span", { class: "track" }, bar), el("span", { class: "number", text: fixed(probability, 3) })));
      })),
      el("form", { onsubmit: (event) => { event.preventDefault(); if (field.value.trim()) force([...before, field.value.trim()]); } }, field, el("button", { type: "submit", text: say("force") })),
    );
  }

  translate(0);
  return () => stops.forEach((stop) => stop());
}

function best(weights) {
  return weights.indexOf(Math.max(...weights));
}

// Returns how far two translations agree. Weights can be compared only for the same target word over the same pieces of
// the source.
function agreement([one, two], sources) {
  const all = Math.max(one.tokens.length, two.tokens.length);
  const shared = Math.min(one.tokens.length, two.tokens.length);
  let [same, difference, count] = [0, 0, 0];
  for (let n = 0; n < shared; n++) {
    if (one.tokens[n] !== two.tokens[n]) continue;
    same += 1;
    if (sources[0].join("\u0000") !== sources[1].join("\u0000") || one.weights[n].length !== two.weights[n].length) continue;
    one.weights[n].forEach((weight, j) => { difference += Math.abs(weight - two.weights[n][j]); count += 1; });
  }
  if (count) return say("agreement", { same, all, difference: fixed(difference / count, 3) });
  const why = same ? say("otherPieces", { one: sources[0].length, two: sources[1].length }) : say(all ? "otherWordsAll" : "bothEmpty");
  return say("incomparable", { same, all, why });
}
