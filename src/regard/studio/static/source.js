// A trace over HTTP, with the interface of /page/source.js. Numbers come as bytes: half floats or bytes with a scale.

import { ask, json } from "./ask.js";

const REMEMBERED = 400;

export class StudioSource {
  static async open(id) {
    const source = new StudioSource();
    source.base = `/api/traces/${encodeURIComponent(id)}`;
    source.id = id;
    source.finer = true;
    source.known = new Map();
    source.about = await json(`${source.base}/records`);
    return source;
  }

  thumbnail(record, head) {
    return this.grid("thumbnail", { record, head }).then((grid) => ({
      ...grid,
      values: grid.values.map((value) => Math.sqrt(grid.highest > 0 ? value / grid.highest : 0)), // lifts what is faint
      highest: 1,
    }));
  }

  map(record, head) {
    return this.grid("map", { record, head });
  }

  tile(record, head, row0, column0, rows, columns) {
    return this.grid("tile", { record, head, row: row0, column: column0, rows, columns });
  }

  rows(record, head, row) {
    return this.floats("rows", { record, head, row }).then((values) => ({ row, indices: null, values, rest: 0, error: 0 }));
  }

  received(record, head) {
    return this.floats("received", { record, head });
  }

  async picture(label) {
    if (!this.about.labels[label]?.picture) return null;
    return (await ask(`${this.base}/picture?label=${label}`)).blob();
  }

  faithfulness(record, head, row) {
    return this.once("faithfulness", { record, head, row }, (answer) => answer.json());
  }

  grid(what, fields) {
    return this.once(what, fields, async (answer) => {
      const about = JSON.parse(answer.headers.get("x-regard-grid"));
      const data = await answer.arrayBuffer();
      const values = about.type === "uint8" ? Float32Array.from(new Uint8Array(data), (n) => n * about.scale) : halves(data, about.scale);
      return { ...about, values };
    });
  }

  floats(what, fields) {
    return this.once(what, fields, async (answer) => new Float32Array(await answer.arrayBuffer()));
  }

  once(what, fields, read) {
    const path = `${this.base}/${what}?${new URLSearchParams(fields)}`;
    if (!this.known.has(path)) {
      if (this.known.size >= REMEMBERED) this.known.delete(this.known.keys().next().value);
      const answer = ask(path).then(read);
      answer.catch(() => this.known.delete(path));
      this.known.set(path, answer);
    }
    return this.known.get(path);
  }
}

let table = null;

// Half floats as numbers, times a scale. There are only 65,536 of them.
function halves(buffer, scale) {
  table ??= Float32Array.from({ length: 65536 }, (_, bits) => half(bits));
  return Float32Array.from(new Uint16Array(buffer), (bits) => table[bits] * scale);
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}
