// Draws a small map as a table of numbers, in which larger numbers have darker cells.

import { css, ink } from "/page/colors.js";
import { el } from "/page/dom.js";
import { short } from "/page/format.js";
import { say } from "./words.js";

export function theme() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

// `values` are rows of numbers, with null for a masked cell; `text(value)` formats a number; `share(value)` is the
// darkness of the number's cell, from 0 to 1.
export function cells({ values, rows, columns, text, share, selected, choose, label, totals }) {
  const paper = theme();
  const many = columns.length > 10;
  const table = el("table", { class: `cells${many ? " many" : ""}`, "aria-label": label });
  const head = el("tr", {}, el("td"), ...columns.map((name) => el("th", { scope: "col", title: name }, el("span", { text: short(name, 14) }))));
  if (totals) head.append(el("th", { scope: "col", class: "total", text: say("sum") }));
  table.append(el("thead", {}, head));
  const body = el("tbody");
  values.forEach((line, i) => {
    const tr = el("tr", {}, el("th", { scope: "row", title: rows[i], text: short(rows[i], 14) }));
    line.forEach((value, j) => {
      const masked = value === null;
      const shown = masked ? "–" : text(value);
      const chosen = selected && selected.row === i && selected.column === j;
      const button = el("button", {
        type: "button", text: shown, "data-row": i, "data-column": j, "aria-pressed": String(Boolean(chosen)), tabindex: chosen || (!selected && !i && !j) ? "0" : "-1",
        "aria-label": say("cellOf", { row: rows[i], column: columns[j], value: masked ? say("masked") : shown }), class: masked ? "masked" : null,
        onclick: () => choose?.(i, j),
      });
      if (!masked) {
        const depth = Math.min(1, Math.max(0, share(value)));
        button.style.backgroundColor = css(depth, paper);
        button.style.color = ink(depth, paper);
      }
      tr.append(el("td", {}, button));
    });
    if (totals) tr.append(el("td", { class: "total", text: totals[i] }));
    body.append(tr);
  });
  table.append(body);
  table.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const at = event.target.dataset;
    if (!step || at.row === undefined || !choose) return;
    event.preventDefault();
    const row = Math.min(rows.length - 1, Math.max(0, Number(at.row) + step[0]));
    const column = Math.min(columns.length - 1, Math.max(0, Number(at.column) + step[1]));
    const name = table.getAttribute("aria-label");
    choose(row, column);
    document.querySelector(`table[aria-label="${CSS.escape(name)}"] [data-row="${row}"][data-column="${column}"]`)?.focus();
  });
  return el("div", { class: "scrolls" }, table);
}
