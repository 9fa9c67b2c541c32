// Joins the sub-word pieces of labels into words. A token that continues a word begins with a dot ("·ing"), and a part
// of a character has a number ("汤⟨2/3⟩").

const PART = /(.)⟨(\d+)\/\d+⟩/gu;
const LATER = /^.⟨(?!1\/)\d+\/\d+⟩/u;
const WIDE = /[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60]/;
const CLOSING = /^[.,;:!?)\]}%»”’]/;

// The words along an axis as { start, stop, name }, where start and stop count pieces; null if every piece is a whole
// word.
export function wordsOf(labels) {
  if (labels?.kind !== "tokens") return null;
  const words = [];
  labels.items.forEach((item, n) => {
    const inside = (item.startsWith("·") && item.length > 1) || LATER.test(item);
    if (n && inside) Object.assign(words.at(-1), { stop: n + 1, name: words.at(-1).name + own(item) });
    else words.push({ start: n, stop: n + 1, name: own(item) });
  });
  return words.length < labels.items.length ? words : null;
}

// The text that a sub-word piece adds to its word. A character that is split over several pieces is added by the first
// piece.
function own(item) {
  const text = item.length > 1 ? item.replace(/^·/, "") : item;
  return text.replace(PART, (_, character, part) => (part === "1" ? character : ""));
}

// Returns the map of the weights between words instead of pieces, with its labels. The weights of a word as a query are
// the mean over its pieces, and its weight as a key is the sum over its pieces (Clark et al. 2019, section 4.1), so
// every row still sums to 1.
export function byWords({ record, map, rows, columns }) {
  const [down, right] = [wordsOf(rows) ?? each(record.queries), wordsOf(columns) ?? each(record.keys)];
  const values = new Float32Array(down.length * right.length);
  let highest = 0;
  down.forEach(({ start, stop }, i) => {
    right.forEach(({ start: left, stop: end }, j) => {
      let sum = 0;
      for (let row = start; row < stop; row++) for (let column = left; column < end; column++) sum += map.values[row * map.columns + column];
      values[i * right.length + j] = sum / (stop - start);
      if (Number.isFinite(sum)) highest = Math.max(highest, Math.abs(values[i * right.length + j]));
    });
  });
  const received = new Float32Array(right.length);
  values.forEach((value, n) => (received[n % right.length] += value / down.length));
  const longest = Math.max(...right.map(({ start, stop }) => stop - start));
  return {
    record: { ...record, queries: down.length, keys: right.length },
    map: { ...map, rows: down.length, columns: right.length, values, highest, error: map.error * longest },
    received, rows: renamed(rows, down), columns: renamed(columns, right),
  };
}

function each(count) {
  return Array.from({ length: count }, (_, n) => ({ start: n, stop: n + 1 }));
}

function renamed(labels, words) {
  return labels && wordsOf(labels) ? { kind: labels.kind, picture: false, items: words.map(({ name }) => name) } : labels;
}

// The labels of an axis as running text; null if the labels are not text. Labels of kind "list" are text if there are
// more than two and each is a single word.
export function sentenceOf(labels) {
  const isText = labels?.kind === "list" && labels.items.length > 2 && !labels.items.some((item) => item.includes(" "));
  if (labels?.kind !== "tokens" && !isText) return null;
  const words = (wordsOf(labels) ?? labels.items.map((name) => ({ name }))).map(({ name }) => name);
  return words.reduce((text, word) => {
    const apart = text && !CLOSING.test(word) && !(WIDE.test(text.at(-1)) || WIDE.test(word[0] ?? ""));
    return text + (apart && !/^\s/.test(word) ? " " : "") + word;
  }, "");
}
