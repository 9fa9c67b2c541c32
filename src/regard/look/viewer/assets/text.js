// The view of a text: its tokens in reading order, coloured by the mean weight that each receives, or by the weights of
// the chosen token.

import { headColor, inkOf, stretch, tint } from "./colors.js";
import { labelOf, short, textWidth } from "./format.js";

const SIZE = 15;
const HIGH = 30;
const MOST = 4096; // largest number of tokens that this view shows

export const text = {
  name: "text",
  keys: "flow",
  fits: ({ record, rows, columns }) => record.keys <= MOST && [rows, columns].every((labels) => !labels || isText(labels)),
  layout,
};

function isText({ kind }) {
  return kind === "tokens" || kind === "list";
}

function layout(model, look) {
  const width = Math.min(look.width, 760);
  const parts = [];
  let y = 34;
  if (!model.same) {
    parts.push(flow("row", model.rows, model.record.queries, width, y));
    y = parts[0].bottom + 44;
  }
  parts.push(flow(model.same ? "both" : "column", model.columns, model.record.keys, width, y));
  return {
    width,
    height: parts.at(-1).bottom + 12,
    deepest: look.active === null ? model.mostReceived : look.rowHighest,
    draw: (painter, box) => draw(painter, box, parts, model, look),
    hit: (x, y) => hit(x, y, parts),
    at: (row) => {
      const found = parts[0].boxes[row] ?? { x: 0, y: 0 };
      return { x: found.x, y: found.y + HIGH / 2, left: 0, top: 0 };
    },
  };
}

function flow(side, labels, count, width, top) {
  const boxes = [];
  let [x, y] = [2, top];
  for (let n = 0; n < count; n++) {
    const word = short(labelOf(labels, n), 40);
    const wide = textWidth(word, SIZE) + 12;
    if (x + wide > width - 2 && x > 2) [x, y] = [2, y + HIGH + 4];
    boxes.push({ x, y, wide, word });
    x += wide + 4;
  }
  return { side, top, boxes, bottom: y + HIGH };
}

function hit(x, y, parts) {
  for (const { side, boxes } of parts) {
    const n = boxes.findIndex((box) => x >= box.x && x <= box.x + box.wide && y >= box.y && y <= box.y + HIGH);
    if (n >= 0) return side === "column" ? { row: null, column: n } : { row: n, column: null };
  }
  return null;
}

function draw(painter, box, parts, model, look) {
  const { colors } = look;
  painter.rect(box.x, box.y, box.width, box.height, { fill: colors.page });
  const chosen = look.active === null ? null : model.weights(look.active);
  const tints = chosen ?? model.received;
  const most = chosen ? look.rowHighest : model.mostReceived;
  const each = model.parts ? (chosen ? model.partsOf(look.active) : model.parts.map((part) => part.received)) : null;
  for (const { side, top, boxes } of parts) {
    const words = chosen ? look.say("tinted", { row: short(labelOf(model.rows, look.active)) }) : look.say("received");
    painter.text(side === "row" ? look.say("asks") : words, 2, top - 18, { size: 12, color: colors.quiet });
    boxes.forEach(({ x, y, wide, word }, n) => {
      if (y > box.y + box.height || y + HIGH < box.y) return;
      const value = side === "row" ? 0 : tints[n];
      const plain = tint(each ? 0 : value, most, look.scale, look.theme);
      painter.rect(x, y, wide, HIGH, { fill: plain, radius: 5 });
      if (each && side !== "row") striped(painter, x, y, wide, model.parts, each, n, most, look);
      const asks = side !== "column" && n === look.active;
      const found = (side === "column" && n === look.locked?.column) || matched(side, n, look);
      const edge = { stroke: found ? colors.accent : colors.mark, line: found || n === look.locked?.row ? 2 : 1.25, radius: 5 };
      if (asks || found) painter.rect(x, y, wide, HIGH, edge);
      painter.text(word, x + 6, y + HIGH / 2 + 0.5, { size: SIZE, color: each ? colors.text : inkOf(value, most, look.scale, look.theme), weight: 400 });
    });
  }
}

// Draws a stripe for each head behind a token, more opaque for a larger weight.
function striped(painter, x, y, wide, parts, each, n, most, look) {
  const step = wide / parts.length;
  parts.forEach(({ hue }, place) => {
    const share = stretch(each[place][n], most, look.scale);
    painter.rect(x + step * place, y, step, HIGH, { fill: headColor(hue, look.theme), opacity: 0.55 * share });
  });
}

function matched(side, n, { matches }) {
  return side === "row" ? matches.rows.has(n) : matches.columns.has(n);
}
