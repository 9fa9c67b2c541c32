// Draws charts of a run's metrics over its steps: one chart for each metric.

import { el } from "/page/dom.js";
import { show } from "./numbers.js";
import { svg } from "./svg.js";
import { named, say } from "./words.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [480, 230, 52, 26, 12, 14];
const KNOWN = { loss: "loss", learning_rate: "learningRate", gradient_norm: "gradientNorm", tokens_per_second: "tokensPerSecond" };
// The charts of the learning rate, the gradient norm and the throughput come last.
const LAST = ["learning_rate", "gradient_norm", "tokens_per_second"];

// `series` is a list of { kind, name, points, last, mean_of }; `labels` has the display names of the task's metrics.
export function drawn(series, labels) {
  const names = [...new Set(series.map(({ name }) => name))];
  const steps = series.flatMap(({ points }) => points.map(([step]) => step));
  const [least, end] = [Math.min(...steps), Math.max(...steps)];
  const reach = [least < end / 5 ? 0 : least, end]; // all charts have the same range of steps
  const rank = (name) => (name === "loss" ? -1 : LAST.includes(name) ? 1 : 0);
  return names.sort((one, two) => rank(one) - rank(two)).map((name) => chart(name, series.filter((one) => one.name === name), labels[name], reach));
}

function chart(name, lines, label, [first, end]) {
  const title = name in KNOWN ? say(KNOWN[name]) : named(label?.label ?? name);
  const write = (value) => (label?.percent ? `${show(100 * value, 3)} %` : show(value, 4));
  const steps = lines.flatMap(({ points }) => points.map(([step]) => step));
  const values = lines.flatMap(({ points }) => points.map(([, value]) => value));
  const ticks = nice(Math.min(...values), Math.max(...values));
  const [low, high] = [ticks[0], ticks.at(-1)];
  const x = (step) => LEFT + (end > first ? (step - first) / (end - first) : 0.5) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const kind = (line) => (line.kind === "validation" ? "validation" : "train");
  const newest = lines.map((line) => `${say(kind(line) === "train" ? "training" : "validation")} ${write(line.last[1])}`).join(", ");
  const readout = el("span", { class: "readout", text: newest });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "data-figure": name, "aria-label": say("curveOf", { title, newest, step: show(end, 7) }) });
  for (const tick of ticks) picture.append(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick), class: "rule" }), svg("text", { x: LEFT - 7, y: y(tick) + 4, class: "tick", "text-anchor": "end", text: write(tick) }));
  const marks = nice(first, end, 6).filter((step) => step >= first && step <= end);
  for (const step of marks) picture.append(svg("text", { x: x(step), y: HEIGHT - 7, class: "tick", "text-anchor": x(step) > WIDTH - 40 ? "end" : "middle", text: step.toLocaleString("en-US") }));
  picture.append(svg("text", { x: LEFT - 12, y: HEIGHT - 7, class: "tick", "text-anchor": "end", text: say("step") }));
  for (const line of lines) {
    const points = line.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    picture.append(svg("polyline", { class: kind(line), points: points.join(" ") }));
    if (points.length <= 60 && kind(line) === "validation") line.points.forEach(([step, value]) => picture.append(svg("circle", { class: kind(line), cx: x(step), cy: y(value), r: 3 })));
    else if (points.length === 1) picture.append(svg("circle", { class: kind(line), cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 3 }));
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  picture.append(cross);
  const all = [...new Set(steps)].sort((one, two) => one - two);
  let place = null;
  const point = (n) => {
    place = n === null ? null : Math.max(0, Math.min(all.length - 1, n));
    const at = place === null ? -9 : x(all[place]);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    readout.textContent = place === null ? newest : `${say("step")} ${Math.round(all[place]).toLocaleString("en-US")}: ${lines.map((line) => `${say(kind(line) === "train" ? "training" : "validation")} ${write(nearest(line.points, all[place])[1])}`).join(", ")}`;
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (end - first);
    point(all.indexOf(nearest(all.map((one) => [one]), step)[0]));
  });
  picture.addEventListener("pointerleave", () => point(null));
  picture.addEventListener("blur", () => point(null));
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    point(place === null ? (move < 0 ? all.length - 1 : 0) : place + move);
  });
  const merged = Math.max(...lines.map((line) => line.mean_of));
  return el(
    "figure", { class: "curve card" },
    el("figcaption", {}, el("strong", { text: title }), readout), picture,
    lines.length > 1 ? el("p", { class: "legend" }, ...lines.map((line) => el("span", {}, svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("polyline", { points: "1,5 25,5", class: kind(line) })), say(kind(line) === "train" ? "training" : "validation")))) : "",
    merged > 1 ? el("p", { class: "quiet", text: say("meanOf", { count: merged.toLocaleString("en-US") }) }) : "",
  );
}

function nearest(points, step) {
  return points.reduce((best, one) => (Math.abs(one[0] - step) < Math.abs(best[0] - step) ? one : best));
}

// Returns round numbers at equal distances that enclose the range from `low` to `high`.
export function nice(low, high, count = 5) {
  const spread = high - low || Math.abs(high) || 1;
  const rough = spread / (count - 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999);
  const start = Math.floor(low / unit + 1e-9);
  const stop = Math.max(start + 1, Math.ceil(high / unit - 1e-9));
  return Array.from({ length: stop - start + 1 }, (_, n) => Number(((start + n) * unit).toPrecision(12)));
}
