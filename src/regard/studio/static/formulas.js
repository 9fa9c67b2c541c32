// The formulas of the three stages of attention (scores, weights, output) in MathML.

import { say } from "./words.js";

const NS = "http://www.w3.org/1998/Math/MathML";

function m(tag, ...children) {
  const element = document.createElementNS(NS, tag);
  element.append(...children.map((child) => (typeof child === "string" ? text(child) : child)));
  return element;
}

// One token of a formula as a MathML element: a number, a sign, or a name.
function text(word) {
  const element = document.createElementNS(NS, /^[\d.]+$/.test(word) ? "mn" : /^[\p{L}τσ]+$/u.test(word) ? "mi" : "mo");
  element.textContent = word;
  return element;
}

function plain(words) {
  const element = document.createElementNS(NS, "mtext");
  element.textContent = words;
  return element;
}

const row = (...children) => m("mrow", ...children);
const sub = (base, index) => m("msub", row(base), row(...index));
const fraction = (above, below) => m("mfrac", row(...above), row(...below));
const root = (...inside) => m("msqrt", ...inside);
const power = (base, exponent) => m("msup", row(base), row(exponent));
const s = (...index) => sub("s", index);
const a = () => sub("a", ["i", "j"]);
const q = () => sub("q", ["i"]);
const k = () => sub("k", ["j"]);
const product = () => ["⟨", q(), ",", k(), "⟩"];
const over = (index) => m("munder", text("∑"), row(index));

function formula(...parts) {
  const math = m("math", row(...parts));
  math.setAttribute("display", "block");
  return math;
}

export function scores(kind, temperature) {
  const warm = temperature === 1 ? [] : ["T"];
  const divided = (above, below) => (below.length ? [fraction(above, below)] : above);
  const forms = {
    dot: () => divided(product(), warm),
    scaled_dot: () => divided(product(), [...warm, root("d")]),
    cosine: () => divided(product(), [...warm, "‖", q(), "‖", "‖", k(), "‖"]),
    bilinear: () => divided([q(), "W", k()], warm),
    additive: () => [...(warm.length ? [fraction(["1"], warm)] : []), "w", "·", "tanh", "(", sub("W", ["q"]), q(), "+", sub("W", ["k"]), k(), ")"],
  };
  return formula(s("i", "j"), "=", ...forms[kind]());
}

export function weights(kind) {
  const forms = {
    softmax: () => [fraction(["exp", s("i", "j")], [over("m"), "exp", s("i", "m")])],
    sparsemax: () => ["max", "(", "0", ",", s("i", "j"), "−", sub("τ", ["i"]), ")"],
    entmax: () => [power(row("max", "(", "0", ",", fraction(["1"], ["2"]), s("i", "j"), "−", sub("τ", ["i"]), ")"), "2")],
    sigmoid: () => [fraction(["1"], ["1", "+", "exp", "(", "−", s("i", "j"), ")"])],
    hard: () => [plain(say("hardIs"))],
  };
  const ends = { sparsemax: true, entmax: true };
  const sum = ends[kind] ? [plain(",\u2002"), over("j"), a(), "=", "1"] : [];
  return formula(a(), "=", ...forms[kind](), ...sum);
}

export function output() {
  return formula(sub("o", ["i"]), "=", over("j"), a(), sub("v", ["j"]));
}
