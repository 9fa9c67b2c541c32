// Functions that convert numbers and labels to displayed text.

// A weight as text: three significant digits and at least three decimals, but no more than its storage error allows.
// Weights of one list get the number of decimals of the weight `like`.
export function weight(value, error = 0, like = value) {
  if (!Number.isFinite(value)) return odd(value);
  const sure = error > 0 ? Math.max(1, Math.floor(-Math.log10(2 * error))) : 6;
  const size = Math.abs(like);
  const wanted = size > 0 && size < Infinity ? Math.ceil(-Math.log10(size)) + 2 : 3;
  return value.toFixed(Math.min(6, sure, Math.max(3, wanted))).replace("-", "−");
}

// Whether a value is known; unknown values are null.
export function known(value) {
  return value !== null && value !== undefined;
}

// Whether a number is NaN, ∞ or −∞.
export function odd(value) {
  return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
}

// The smallest of 1, 2, 5, 10, 20, … that is not smaller than a number.
export function nice(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= number * (1 - 1e-9));
}

export function compact(value) {
  if (!Number.isFinite(value)) return odd(value);
  if (value === 0) return "0";
  if (Math.abs(value) >= 0.001 && Math.abs(value) < 10000) return String(Number(value.toPrecision(3)));
  return value.toExponential(1).replace("e-", "e−").replace("e+", "e");
}

// A pattern of control characters, and of invisible marks that could change the direction of the text.
const UNSEEN = /[\u0000-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g;

// A token as visible text: blanks and line ends are replaced by symbols.
export function visible(label) {
  if (label === "") return "∅";
  const shown = label.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(UNSEEN, "·");
  return /^\s+$/.test(shown) ? "␣".repeat(Math.min(4, shown.length)) : shown;
}

export function short(label, longest = 24) {
  const letters = Array.from(visible(label));
  return letters.length > longest ? `${letters.slice(0, longest - 1).join("")}…` : letters.join("");
}

// The label at an index; without labels, the index itself.
export function labelOf(labels, index) {
  return labels?.items[index] ?? String(index);
}

const PATH = /^[\w.]+$/;

// Names of records for display: the name of the layer, or the path of the module. The name begins with the record's
// group, if it has one, and ends with the number of the call if a module was called several times.
export function namesOf(records, say) {
  const calls = new Map();
  for (const { name } of records) calls.set(name, (calls.get(name) ?? 0) + 1);
  const paths = trimmed(records.map(({ name, layer }) => (layer || !PATH.test(name) ? null : name)));
  return records.map(({ name, group, layer, call }, n) => {
    const own = layer ? say.layer(layer) : group ? name.slice(group.length + 3) : (paths[n] ?? name);
    const whole = [group, own || "·"].filter(Boolean).join(" · ");
    return calls.get(name) > 1 ? `${whole} #${call}` : whole;
  });
}

// Module paths without the parts that all of them have in common at the beginning and at the end.
function trimmed(paths) {
  const split = paths.filter((path) => path !== null).map((path) => path.split("."));
  if (new Set(split.map((parts) => parts.join("."))).size < 2) return paths;
  let head = 0;
  while (split.every((parts) => parts.length > head + 1 && parts[head] === split[0][head])) head++;
  let tail = 0;
  const end = (parts) => parts[parts.length - 1 - tail];
  while (split.every((parts) => parts.length > head + tail + 1 && end(parts) === end(split[0]))) tail++;
  return paths.map((path) => path?.split(".").slice(head, path.split(".").length - tail).join(".") ?? null);
}

let ruler = null;
const widths = new Map();
export const FONTS =
  "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif";

// The width of a text in pixels at a font size, cached.
export function textWidth(text, size, weightOf = 400) {
  const name = `${weightOf}/${size}/${text}`;
  if (!widths.has(name)) {
    ruler ??= document.createElement("canvas").getContext("2d");
    ruler.font = `${weightOf} ${size}px ${FONTS}`;
    if (widths.size > 20000) widths.clear();
    widths.set(name, ruler.measureText(text).width);
  }
  return widths.get(name);
}
