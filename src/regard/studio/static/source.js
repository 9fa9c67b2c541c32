// A data source that fetches a trace over HTTP, with the interface of /page/source.js. Numbers arrive as half floats,
// or as bytes with a scale.

import { halves } from "/page/halves.js";
import { ask, json } from "./server.js";

const REMEMBERED = 400;

export class StudioSource {
  // Returns the source of sequence `batch` of a trace.
  static async open(id, batch = 0) {
    const source = new StudioSource();
    source.batch = batch;
    source.base = `/api/traces/${encodeURIComponent(id)}`;
    source.id = id;
    source.finer = true;
    source.known = new Map();
    source.about = await json(`${source.base}/records?batch=${batch}`);
    source.others = new Map([[batch, source]]);
    return source;
  }

  async sequence(n) {
    if (!this.others.has(n)) {
      const source = await StudioSource.open(this.id, n);
      source.others = this.others;
      this.others.set(n, source);
    }
    return this.others.get(n);
  }

  thumbnail(record, head) {
    return this.grid("thumbnail", { record, head });
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
    return (await ask(`${this.base}/picture?label=${label}&batch=${this.batch}`)).blob();
  }

  faithfulness(record, head, row) {
    return this.once("faithfulness", { record, head, row }, (answer) => answer.json());
  }

  grid(what, fields) {
    return this.once(what, fields, async (answer) => {
      const about = JSON.parse(answer.headers.get("x-regard-grid"));
      const data = await answer.arrayBuffer();
      const values = about.type === "uint8" ? Float32Array.from(new Uint8Array(data), (n) => n * about.scale) : halves(new Uint16Array(data), about.scale);
      return { ...about, values };
    });
  }

  floats(what, fields) {
    return this.once(what, fields, async (answer) => new Float32Array(await answer.arrayBuffer()));
  }

  once(what, fields, read) {
    const batch = this.about.records[fields.record].item;
    const path = `${this.base}/${what}?${new URLSearchParams({ ...fields, batch })}`;
    if (!this.known.has(path)) {
      if (this.known.size >= REMEMBERED) this.known.delete(this.known.keys().next().value);
      const answer = ask(path).then(read);
      answer.catch(() => this.known.delete(path));
      this.known.set(path, answer);
    }
    return this.known.get(path);
  }
}
