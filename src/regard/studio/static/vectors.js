// Editable vectors: each is a row of number fields, with a bar behind each number.

import { el } from "/page/dom.js";
import { signed } from "./numbers.js";
import { say } from "./words.js";

const STEP = 0.5;

// `rows` is a list of { name, numbers }, which the fields modify in place; `changed()` is called after each change.
export function editor({ kind, title, rows, most, changed, removed, added, readonly = false }) {
  const box = el("fieldset", { class: `vectors ${kind}` }, el("legend", { text: title }));
  const reach = Math.max(1, ...rows.flatMap((row) => row.numbers.map(Math.abs)));
  // Position of zero in a number's bar, in percent.
  const floor = rows.some((row) => row.numbers.some((number) => number < 0)) ? 50 : 0;
  rows.forEach((row, n) => {
    const label = row.name || `${say(kind)} ${n}`;
    const name = el("input", {
      class: "name", value: row.name, maxlength: 40, "aria-label": say("nameOf", { kind: say(kind), n }), readonly,
      spellcheck: "false", autocomplete: "off", oninput: (event) => { row.name = event.target.value; changed(); },
    });
    const line = el("div", { class: "vector" }, name);
    row.numbers.forEach((_, at) => line.append(number(row, at, { label, reach, floor, changed, readonly })));
    if (removed && rows.length > 1) {
      line.append(el("button", { type: "button", class: "quiet", text: "×", title: say("remove", { name: label }), "aria-label": say("remove", { name: label }), onclick: () => removed(n) }));
    }
    box.append(line);
  });
  if (added && rows.length < most) {
    box.append(el("button", { type: "button", class: "quiet add", text: `+ ${say(kind === "query" ? "addQuery" : "addKey")}`, onclick: added }));
  }
  return box;
}

function number(row, at, { label, reach, floor, changed, readonly }) {
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  const input = el("input", {
    class: "number", type: "text", inputmode: "decimal", value: signed(readonly ? tenths(row.numbers[at]) : String(row.numbers[at])), readonly,
    title: readonly ? signed(String(row.numbers[at])) : null,
    role: "spinbutton", "aria-valuenow": row.numbers[at], "aria-label": say("component", { name: label, n: at }), autocomplete: "off",
  });
  const cell = el("span", { class: "cell" }, bar, input);
  const put = (value, typed = false) => {
    row.numbers[at] = Math.max(-9999, Math.min(9999, Math.round(value * 100) / 100));
    input.setAttribute("aria-valuenow", row.numbers[at]);
    if (!typed) input.value = signed(String(row.numbers[at]));
    draw();
    changed();
  };
  const draw = () => {
    const value = row.numbers[at];
    const height = (floor ? 50 : 100) * Math.min(1, Math.abs(value) / reach);
    bar.style.height = `${value < 0 && !floor ? 0 : height}%`;
    bar.style.bottom = `${value < 0 ? Math.max(0, floor - height) : floor}%`;
  };
  draw();
  if (readonly) return cell;
  input.addEventListener("input", () => {
    const value = Number(input.value.replace("−", "-").replace(",", "."));
    const good = input.value.trim() !== "" && Number.isFinite(value);
    input.setAttribute("aria-invalid", String(!good));
    if (good) put(value, true);
  });
  input.addEventListener("keydown", (event) => {
    const step = { ArrowUp: STEP, ArrowDown: -STEP, PageUp: 10 * STEP, PageDown: -10 * STEP }[event.key];
    if (!step) return;
    event.preventDefault();
    put(row.numbers[at] + step);
  });
  drag(cell, input, () => row.numbers[at], put, reach);
  return cell;
}

// Formats a number with one decimal and without a leading zero, so that many numbers fit: .4, −1.2, 0.
function tenths(value) {
  const rounded = Math.round(value * 10) / 10;
  return rounded === 0 ? "0" : rounded.toFixed(1).replace(/^(-?)0\./, "$1.");
}

// Changes the number in a cell when the pointer drags it up or down; a click without a movement starts typing.
function drag(cell, input, read, put, reach) {
  cell.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [from, start] = [event.clientY, read()];
    let moved = false;
    const move = (now) => {
      const way = from - now.clientY;
      if (!moved && Math.abs(way) < 4) return;
      if (!moved) {
        moved = true;
        cell.setPointerCapture(event.pointerId);
        cell.classList.add("dragged");
        input.blur();
      }
      put(Math.round((start + (way / 40) * Math.max(1, reach / 5)) * 10) / 10);
    };
    const stop = () => {
      cell.removeEventListener("pointermove", move);
      cell.classList.remove("dragged");
    };
    cell.addEventListener("pointermove", move);
    cell.addEventListener("pointerup", stop, { once: true });
    cell.addEventListener("pointercancel", stop, { once: true });
  });
}
