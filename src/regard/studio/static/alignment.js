// Draws the alignment of a translation: source words above, target words below, and a line from each target word to the
// source words that it attends to.

import { el, whenResized } from "/page/dom.js";
import { short } from "/page/format.js";
import { fixed } from "./numbers.js";
import { svg } from "./svg.js";
import { say } from "./words.js";

const FAINT = 0.02;

export function alignment({ source, beam, chosen, forced, other, pick }) {
  const above = source.map((word) => el("span", { class: "word", text: short(word, 30) }));
  let pointed = null;
  const below = beam.tokens.map((word, n) => el("button", {
    type: "button", text: short(word, 30), "aria-pressed": String(n === chosen), "aria-label": described(word, beam.weights[n], source),
    class: `word${n < forced ? " forced" : ""}${other && other.tokens[n] !== word ? " other" : ""}`,
    onclick: () => pick(n), onpointerenter: () => point(n), onpointerleave: () => point(null), onfocus: () => point(n), onblur: () => point(null),
  }));
  const picture = svg("svg", { "aria-hidden": "true" });
  const element = el("div", { class: "pair" }, picture, el("div", { class: "words" }, ...above), el("div", { class: "words" }, ...(below.length ? below : [el("span", { class: "word", text: say("emptyTarget") })])));

  function point(n) {
    pointed = n;
    lines();
  }

  function lines() {
    const box = element.getBoundingClientRect();
    if (!box.width) return;
    const wide = element.scrollWidth;
    picture.setAttribute("viewBox", `0 0 ${wide} ${box.height}`);
    picture.style.width = `${wide}px`;
    const middle = (word) => {
      const { left, width } = word.getBoundingClientRect();
      return left + width / 2 - box.left + element.scrollLeft;
    };
    const top = above[0].getBoundingClientRect().bottom - box.top;
    const bottom = below[0] ? below[0].getBoundingClientRect().top - box.top : top;
    const active = pointed ?? chosen;
    const paths = [];
    below.forEach((word, n) => above.forEach((from, j) => {
      const weight = beam.weights[n][j];
      if (weight < FAINT) return;
      const [x0, x1, bend] = [middle(from), middle(word), (bottom - top) * 0.45];
      const faded = active !== undefined && active !== null && active !== n;
      paths.push(svg("path", {
        d: `M${x0} ${top + 3} C${x0} ${top + bend} ${x1} ${bottom - bend} ${x1} ${bottom - 3}`, "data-target": n, "data-source": j,
        "stroke-width": 0.8 + 6 * weight, "stroke-opacity": (faded ? 0.12 : 0.25 + 0.65 * weight).toFixed(3),
      }));
    }));
    picture.replaceChildren(...paths);
  }

  const stop = whenResized(element, lines);
  return { element, stop };
}

function described(word, weights, source) {
  const order = weights.map((weight, j) => ({ weight, word: source[j] })).sort((a, b) => b.weight - a.weight).slice(0, 3);
  return say("looksAt", { row: word, list: order.filter(({ weight }) => weight >= FAINT).map((one) => `${one.word} ${fixed(one.weight, 2)}`).join(", ") });
}
