// Shows the three stages of attention (scores, weights, output): for each its formula, its numbers, and the arithmetic
// for the chosen pair of query and key.

import { css, ink } from "/page/colors.js";
import { el } from "/page/dom.js";
import { short } from "/page/format.js";
import { cells, theme } from "./cells.js";
import * as formulas from "./formulas.js";
import { fixed, show, vector } from "./numbers.js";
import { say } from "./words.js";

const FEW = 6; // largest number of keys, or of vector components, whose arithmetic is written out

export function stages({ setup, answer, head, selected, choose }) {
  const rows = setup.query.map((row, n) => row.name || `q${n}`);
  const columns = setup.key.map((row, n) => row.name || `k${n}`);
  const scores = answer.scores[head].map((line, i) => line.map((value, j) => (answer.allowed[i][j] ? value : null)));
  const weights = answer.weights[head];
  const known = scores.flat().filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const many = columns.length > 10;
  // In cells of this width only two decimals fit; the line below each stage has all decimals.
  const broad = columns.length > 4;
  const pair = { i: Math.min(selected.row, rows.length - 1), j: Math.min(selected.column, columns.length - 1) };
  const at = { row: pair.i, column: pair.j };
  const context = { setup, answer, head, scores, weights, rows, columns, ...pair };
  return el(
    "div", { class: `stages${many ? " wide" : broad ? " broad" : ""}` },
    stage(1, formulas.scores(setup.score, setup.temperature), cells({
      values: scores, rows, columns, selected: at, choose, label: say("stage1"),
      text: (value) => (broad ? brief(value) : show(value, 4)), share: (value) => (high > low ? (0.75 * (value - low)) / (high - low) : 0.35),
    }), scoreWork(context)),
    stage(2, formulas.weights(setup.normalize), cells({
      values: weights.map((line, i) => line.map((value, j) => (answer.allowed[i][j] ? value : null))), rows, columns, selected: at, choose, label: say("stage2"),
      text: (value) => (broad ? fixed(value, 2).replace(/^0/, "") : fixed(value, 4)), share: (value) => value, totals: answer.sums[head].map((sum) => fixed(sum, broad ? 2 : 3)),
    }), weightWork(context)),
    stage(3, formulas.output(), outputs(context, choose), outputWork(context)),
  );
}

function brief(value) {
  return Math.abs(value) >= 100 ? show(value, 3) : fixed(value, 2);
}

function stage(number, formula, picture, work) {
  const name = say(`stage${number}`);
  return el(
    "section", { class: "stage card", "aria-label": name },
    el("h2", {}, el("span", { class: "count", text: number }), name, el("small", { text: say(`stage${number}Help`) })),
    el("div", { class: "formula" }, formula), picture, el("p", { class: "work", "aria-live": "polite", text: work }),
  );
}

function part(numbers, head, heads) {
  const size = numbers.length / heads;
  return numbers.slice(head * size, (head + 1) * size);
}

function scoreWork({ setup, answer, head, scores, i, j, rows, columns }) {
  const value = scores[i][j];
  const name = `${rows[i]} · ${columns[j]}`;
  if (value === null) return `${name}: ${say("masked")}`;
  const query = part(setup.query[i].numbers, head, setup.heads);
  const key = part(setup.key[j].numbers, head, setup.heads);
  const result = show(value, 5);
  const warm = setup.temperature === 1 ? "" : ` / ${show(setup.temperature)}`;
  const terms = query.slice(0, FEW).map((number, n) => `${term(number)}·${term(key[n])}`).join(" + ") + (query.length > FEW ? " + …" : "");
  const dot = query.reduce((sum, number, n) => sum + number * key[n], 0);
  const forms = {
    dot: `${terms} = ${show(dot, 5)}${warm}${warm ? ` = ${result}` : ""}`,
    scaled_dot: `${terms} = ${show(dot, 5)}; ${show(dot, 5)} / √${query.length}${warm} = ${result}`,
    cosine: `${show(dot, 5)} / (${show(length(query))} · ${show(length(key))})${warm} = ${result}`,
    bilinear: `${vector(query)} W ${vector(key)}${warm} = ${result}`,
    additive: `w · tanh(W_q ${vector(query)} + W_k ${vector(key)})${warm} = ${result}`,
  };
  return `${name}: ${forms[setup.score]}`;
}

function term(number) {
  return number < 0 ? `(${show(number)})` : show(number);
}

function length(numbers) {
  return Math.sqrt(numbers.reduce((sum, number) => sum + number * number, 0));
}

function weightWork({ setup, answer, scores, weights, i, j, rows, columns }) {
  const name = `${rows[i]} → ${columns[j]}`;
  const line = scores[i].filter((value) => value !== null);
  if (!line.length) return `${rows[i]}: ${say("nothing")}`;
  if (scores[i][j] === null) return `${name}: ${say("masked")}`;
  const result = fixed(weights[i][j], 4);
  const mine = show(scores[i][j]);
  if (setup.normalize === "softmax") {
    const below = line.slice(0, FEW).map((value) => `e^${show(value)}`).join(" + ") + (line.length > FEW ? " + …" : "");
    return `${name}: e^${mine} / (${below}) = ${result}`;
  }
  if (setup.normalize === "sigmoid") return `${name}: 1 / (1 + e^${show(-scores[i][j])}) = ${result}`;
  if (setup.normalize === "hard") return `${name}: ${result}`;
  // The threshold τ of sparsemax or entmax follows from the score and the weight of any key of the row whose weight is
  // positive.
  const seen = weights[i].findIndex((weight) => weight > 0);
  const half = setup.normalize === "entmax";
  const threshold = half ? scores[i][seen] / 2 - Math.sqrt(weights[i][seen]) : scores[i][seen] - weights[i][seen];
  return `${name}: max(0, ${half ? `½ · ${mine}` : mine} − ${term(threshold)})${half ? "²" : ""} = ${result}; τ = ${show(threshold)}`;
}

function outputWork({ setup, answer, weights, head, i, rows }) {
  const values = setup.value ?? setup.key;
  const terms = weights[i]
    .map((weight, j) => ({ weight, numbers: part(values[j].numbers, head, setup.heads) }))
    .filter(({ weight }) => weight >= 0.0005);
  const shown = terms.slice(0, 4).map(({ weight, numbers }) => `${fixed(weight, 3)} · ${vector(numbers)}`).join(" + ");
  return `${rows[i]}: ${shown || "0"}${terms.length > 4 ? " + …" : ""} = ${vector(answer.output[head][i], 4)}`;
}

// Draws the output vectors, and below them a strip whose parts are the weights of the values in the chosen row.
function outputs({ setup, answer, head, weights, rows, columns, i }, choose) {
  const paper = theme();
  const numbers = answer.output[head];
  const most = Math.max(1e-9, ...numbers.flat().map(Math.abs));
  const table = el("table", { class: "cells outputs", "aria-label": say("stage3") });
  numbers.forEach((line, n) => {
    const tr = el("tr", { class: n === i ? "chosen" : null }, el("th", { scope: "row", title: rows[n] }, el("button", { type: "button", class: "link", text: short(rows[n], 14), onclick: () => choose(n, 0) })));
    line.slice(0, 16).forEach((value) => {
      const depth = (0.75 * Math.abs(value)) / most;
      const cell = el("td", {}, el("span", { class: "value", text: rows.length > 4 ? brief(value) : show(value, 4) }));
      cell.firstChild.style.backgroundColor = css(depth, paper);
      cell.firstChild.style.color = ink(depth, paper);
      tr.append(cell);
    });
    table.append(tr);
  });
  const strip = el("div", { class: "strip", role: "img", "aria-label": weights[i].map((weight, j) => `${columns[j]} ${fixed(weight, 2)}`).join(", ") });
  const total = weights[i].reduce((sum, weight) => sum + weight, 0) || 1;
  weights[i].forEach((weight, j) => {
    if (weight / total < 0.004) return;
    const piece = el("span", { title: `${columns[j]} ${fixed(weight, 3)}` }, el("span", { text: weight / total > 0.22 ? `${short(columns[j], 10)} ${fixed(weight, 2)}` : weight / total > 0.08 ? short(columns[j], 10) : "" }));
    piece.style.flexGrow = weight / total;
    const depth = Math.min(1, 0.25 + 0.65 * weight);
    piece.style.backgroundColor = css(depth, paper);
    piece.style.color = ink(depth, paper);
    strip.append(piece);
  });
  return el("div", {}, el("div", { class: "scrolls" }, table), strip);
}
