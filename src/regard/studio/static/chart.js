// Draws the faithfulness of an attention map as two small charts: the model's score without the inputs with the largest
// weights, and its score with only these inputs.

import { el } from "/page/dom.js";
import { fixed } from "./numbers.js";
import { svg } from "./svg.js";
import { say } from "./words.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [400, 200, 40, 34, 10, 12];
const GRADIENT = "gradient × input";
const CLEAR = 0.02; // a smaller difference between the areas under two curves is treated as no difference
const KINDS = { map: "map", random: "random", "gradient × input": "gradient" };

function verdict({ random, [GRADIENT]: gradient }) {
  if (random <= CLEAR) return say("worse");
  const over = say("gain", { value: fixed(random, 2) });
  if (gradient === undefined) return over;
  const name = gradient > CLEAR ? "gainOver" : gradient < -CLEAR ? "lossTo" : "even";
  return `${over} ${say(name, { value: fixed(Math.abs(gradient), 2) })}`;
}

// Draws the curves of an evaluation; `of` is the name of the evaluated row and map.
export function charts(found, of) {
  const names = Object.keys(found.deletion);
  const all = [...Object.values(found.deletion), ...Object.values(found.sufficiency)].flatMap((curve) => [...curve.scores, ...curve.low, ...curve.high]);
  const [low, high] = [Math.min(0, ...all), Math.max(1e-9, ...all)];
  return el(
    "section", { class: "faithful card", "aria-label": say("faithful") },
    el("div", { class: "row between" }, el("h2", {}, say("faithful"), el("small", { text: of })), legend(names)),
    el("p", { class: "quiet", text: say("faithfulHelp") }),
    el("div", { class: "charts" }, chart("deletion", found.deletion, low, high), chart("sufficiency", found.sufficiency, low, high)),
    el("p", { class: "verdict", text: verdict(found.gain) }),
  );
}

export function without() {
  return el("section", { class: "faithful card" }, el("h2", { text: say("faithful") }), el("p", { class: "quiet", text: say("noModel") }));
}

function legend(names) {
  return el("ul", { class: "legend" }, ...names.map((name) => el("li", {}, svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("polyline", { points: "1,5 25,5", class: KINDS[name] ?? "random" })), title(name))));
}

function title(name) {
  return { map: say("map"), random: say("random"), [GRADIENT]: say("gradient") }[name] ?? name;
}

function chart(kind, curves, low, high) {
  const x = (share) => LEFT + share * (WIDTH - LEFT - RIGHT);
  const y = (score) => TOP + ((high - score) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const areas = Object.entries(curves).map(([name, curve]) => `${title(name)} ${fixed(curve.area, 3)}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${say(kind)}: ${say("area")} ${areas}`, "data-kind": kind });
  picture.append(svg("rect", { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM, class: "frame" }));
  for (const share of [0, 0.5, 1]) picture.append(svg("text", { x: x(share), y: HEIGHT - BOTTOM + 15, class: "tick", "text-anchor": share === 1 ? "end" : share ? "middle" : "start", text: `${share * 100} %` }));
  for (const score of [low, high]) picture.append(svg("text", { x: LEFT - 6, y: y(score) + 4, class: "tick", "text-anchor": "end", text: fixed(score, 2) }));
  picture.append(svg("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, class: "tick", "text-anchor": "middle", text: say("fraction") }));
  for (const [name, curve] of Object.entries(curves)) {
    if (!curve.low.length) continue;
    const edge = (scores) => curve.fractions.map((share, n) => `${x(share)},${y(scores[n])}`);
    picture.append(svg("polygon", { class: "band", points: [...edge(curve.high), ...edge(curve.low).reverse()].join(" ") }));
  }
  for (const [name, curve] of Object.entries(curves).sort(([one]) => (one === "map" ? 1 : -1))) {
    picture.append(svg("polyline", { class: KINDS[name] ?? "random", points: curve.fractions.map((share, n) => `${x(share)},${y(curve.scores[n])}`).join(" ") }));
  }
  return el("figure", {}, el("figcaption", {}, el("strong", { text: say(kind) }), " ", el("span", { text: say(`${kind}Help`) })), picture, el("p", { class: "quiet", text: `${say("area")}: ${areas}` }));
}
