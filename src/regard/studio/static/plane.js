// Draws two components of every vector as arrows, whose tips can be dragged or moved by the arrow keys.

import { el } from "/page/dom.js";
import { show } from "./numbers.js";
import { svg } from "./svg.js";
import { say } from "./words.js";

const SIDE = 300;
const MARGIN = 16;

// `arrows` is a list of { name, kind, numbers }; `axes` is [x, y], the indices of the displayed components. The
// returned object has `element`, and `result(numbers)`, which moves the arrow of the output.
export function plane({ arrows, axes, choose, changed }) {
  const size = arrows[0].numbers.length;
  const [x, y] = axes;
  const reach = nice(Math.max(1, ...arrows.flatMap(({ numbers }) => [Math.abs(numbers[x]), Math.abs(numbers[y])])));
  // Without negative numbers, the origin is near the corner, to leave more room for the arrows.
  const low = arrows.some(({ numbers }) => numbers[x] < 0 || numbers[y] < 0) ? -reach : -0.15 * reach;
  const scale = (SIDE - 2 * MARGIN) / (reach - low);
  const zero = MARGIN - low * scale;
  const to = (numbers) => [zero + numbers[x] * scale, SIDE - zero - numbers[y] * scale];
  const picture = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, class: "plane", role: "group", "aria-label": say("plane", { x, y }) });
  for (const share of [-1, -0.5, 0, 0.5, 1].filter((share) => share * reach >= low)) {
    const at = zero + share * reach * scale;
    const line = { class: share === 0 ? "axis" : "grid" };
    picture.append(svg("line", { x1: at, x2: at, y1: MARGIN, y2: SIDE - MARGIN, ...line }), svg("line", { y1: SIDE - at, y2: SIDE - at, x1: MARGIN, x2: SIDE - MARGIN, ...line }));
    if (share > 0) {
      picture.append(svg("text", { x: at, y: SIDE - zero + 13, class: "tick", "text-anchor": "end", text: show(share * reach) }), svg("text", { x: zero - 4, y: SIDE - at + 11, class: "tick", "text-anchor": "end", text: show(share * reach) }));
    }
  }
  // the positions of the arrows' tips and names so far, so that further names do not overlap them
  const placed = new Map();
  const output = { name: say("stage3"), kind: "output", numbers: arrows[0].numbers.map(() => 0), fixed: true };
  const drawn = draw(output, { to, axes, zero, placed });
  drawn.group.style.display = "none";
  picture.append(drawn.group);
  for (const arrow of arrows) picture.append(draw(arrow, { picture, to, scale, zero, axes, changed, placed }).group);
  const result = (numbers) => {
    drawn.group.style.display = numbers ? "" : "none";
    if (!numbers) return;
    output.numbers = numbers;
    drawn.place();
  };
  const pick = (name, value, place) =>
    el("label", { class: "small" }, `${say(name)} `, el("select", { onchange: (event) => choose(place, Number(event.target.value)) },
      ...Array.from({ length: size }, (_, n) => el("option", { value: n, text: n, selected: n === value }))));
  const controls = el("div", { class: "row" }, pick("horizontal", x, 0), pick("vertical", y, 1));
  return { element: el("div", { class: "plane-box" }, picture, size > 2 ? controls : null), result };
}

function draw(arrow, { picture, to, scale, zero, axes, changed, placed }) {
  const [x, y] = axes;
  const line = svg("line", { x1: zero, y1: SIDE - zero, class: "shaft" });
  const tip = svg("circle", { r: arrow.fixed ? 4 : 6, class: "tip" });
  const name = svg("text", { class: "name", text: arrow.name });
  const wide = Array.from(arrow.name).reduce((sum, letter) => sum + (letter > "\u2e7f" ? 12.5 : 7.2), 0);
  const group = svg("g", { class: `arrow ${arrow.kind}` }, line, tip, name);
  const place = () => {
    const [px, py] = to(arrow.numbers);
    const right = px >= zero;
    for (const [attribute, value] of Object.entries({ x2: px, y2: py })) line.setAttribute(attribute, value);
    tip.setAttribute("cx", px);
    tip.setAttribute("cy", py);
    const spot = free(px, py, right, wide, [...placed].filter(([owner]) => owner !== arrow).map(([, box]) => box));
    placed.set(arrow, spot);
    name.setAttribute("x", spot.x);
    name.setAttribute("y", spot.y);
    tip.setAttribute("aria-label", say("planeTip", { name: arrow.name, x: show(arrow.numbers[x]), y: show(arrow.numbers[y]) }));
  };
  place();
  if (arrow.fixed) return { group, place };
  tip.setAttribute("tabindex", "0");
  tip.setAttribute("role", "slider");
  tip.setAttribute("aria-valuenow", arrow.numbers[x]);
  const put = (px, py, done) => {
    arrow.numbers[x] = Math.round(px * 10) / 10;
    arrow.numbers[y] = Math.round(py * 10) / 10;
    place();
    changed(done);
  };
  tip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-0.5, 0], ArrowRight: [0.5, 0], ArrowUp: [0, 0.5], ArrowDown: [0, -0.5] }[event.key];
    if (!step) return;
    event.preventDefault();
    put(arrow.numbers[x] + step[0], arrow.numbers[y] + step[1], false);
  });
  tip.addEventListener("pointerdown", (event) => {
    tip.setPointerCapture(event.pointerId);
    const move = (now) => {
      const box = picture.getBoundingClientRect();
      const [across, up] = [(now.clientX - box.left) * (SIDE / box.width) - zero, SIDE - zero - (now.clientY - box.top) * (SIDE / box.height)];
      put(across / scale, up / scale, false);
    };
    const stop = () => {
      tip.removeEventListener("pointermove", move);
      changed(true);
    };
    tip.addEventListener("pointermove", move);
    tip.addEventListener("pointerup", stop, { once: true });
    tip.addEventListener("pointercancel", stop, { once: true });
  });
  return { group, place };
}

// Returns a free position for the name of an arrow, beside the arrow's tip, preferably on the side to which it points.
function free(px, py, right, wide, others) {
  const [after, before] = [px + 8, px - 8 - wide];
  const sides = right ? [after, before] : [before, after];
  const spots = [-7, 16, 4, -23, 32].flatMap((down) => sides.map((x) => ({ x, y: py + down, wide, px, py })));
  const inside = ({ x, y }) => x >= 4 && x + wide <= SIDE - 4 && y >= 12 && y <= SIDE - 5;
  const meets = (spot, other) => spot.x < other.x + other.wide + 3 && other.x < spot.x + wide + 3 && Math.abs(spot.y - other.y) < 15.5;
  const covers = ({ x, y }, other) => other.px > x - 6 && other.px < x + wide + 6 && other.py > y - 14 && other.py < y + 8;
  const good = spots.filter(inside);
  return good.find((spot) => others.every((other) => !meets(spot, other) && !covers(spot, other))) ?? good[0]
    ?? { ...spots[0], x: Math.min(SIDE - 4 - wide, Math.max(4, spots[0].x)), y: Math.min(SIDE - 5, Math.max(12, spots[0].y)) };
}

// Returns the smallest of 1, 2, 5, 10, 20, 50, … that is not smaller than the value.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= value * 0.999);
}
