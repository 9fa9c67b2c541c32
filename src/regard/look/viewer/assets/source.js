// The data source of the viewer. A source is for one trace; its methods return promises.
//
//   source.about                                -> About, available at once
//   source.thumbnail(record, head)              -> Grid of at most 32 × 32 cells: each has the largest weight in it
//   source.map(record, head)                    -> Grid of the whole map, pooled if it is too large to store
//   source.tile(record, head, row0, column0, rows, columns)
//                                               -> Grid of that part of the map; pooled if it is too large
//   source.rows(record, head, row)              -> Row, the weights of one query
//   source.received(record, head)               -> Float32Array: the mean weight that each key receives
//   source.picture(label)                       -> Blob of a PNG, or null
//   source.finer                                -> true if tile() can have a higher resolution than map()
//   source.sequence(n)                          -> the source of the n-th of about.sequences
//
// `record`, `head` and `label` are indices in the lists of About. If a record has several heads, the head after the
// last is their mean. In the objects below, `?` marks a field that may be missing.
//
// About  { title, parts: { en, zh } or null (the heading of the records), dropped: [sentence], labels: [Labels],
//          records: [{
//            group: the title of the answer that the record belongs to, or "", layer: [word] or null,
//            name, call, kind, heads, queries, keys, scale, note, check,
//            rows, columns: indices in `labels`, or null,
//            entropy: [number for each head] or null, distance: [number for each head] or null }],
//          sequence, sequences: [{ number, text }]: the sequences of the batch in the page, and their first words }
// Labels { kind: "tokens" | "patches" | "frames" | "objects" | "glimpses" | "list", items: [string], grid: [h, w]?,
//            picture: bool, seconds?: the length of a frame, sound?: a WAV file in base64,
//            x?, y?, heading?, speed?, length?, width?, present?: [number for each object],
//            ego?: [x, y, heading, speed for each row]; then x, y, … have a number for each object of each row,
//            lanes?, crossings?, zebras?, ramps?: [metres],
//            sides?: [width of a glimpse at each scale]; with it, x, y and sides are fractions of the image's size,
//            probability?: [probability of each generated word] }
// Grid   { row0, column0, rows, columns, rowBlock, columnBlock, values: Float32Array, highest, error }
//            A cell is the mean of rowBlock × columnBlock weights; `error` bounds the storage error.
//            Values may be negative, infinite or NaN; `highest` is the largest finite |value|.
// Row    { row, indices: Uint32Array or null, values: Float32Array, rest, error }
//            If `indices` is null, there is a value for every key. Otherwise there are only the largest weights, and
//            `rest` is the sum of the others.

import { mostOf } from "./colors.js";
import { halves } from "./halves.js";

export class MemorySource {
  // The data source of a trace whose compressed data is in the page. `packs` has one gzip file in base64 for each
  // record, decompressed at first use. `others` are the sources of all sequences of the batch, including this one.
  constructor(about, packs, pictures, others) {
    this.about = about;
    this.others = others;
    this.finer = false;
    this.packs = packs;
    this.pictures = pictures;
    this.unpacked = new Map();
    this.maps = new Map(); // a cache of the attention maps of recently shown heads
  }

  async sequence(n) {
    return this.others[n];
  }

  async thumbnail(record, head) {
    const { thumbnails } = this.about.records[record];
    if (!this.small) this.small = decompress(decode(this.about.thumbnails));
    const bytes = await this.small;
    const [rows, columns] = thumbnails.shape;
    const [start, cells, highest] = [thumbnails.start, rows * columns, thumbnails.peaks[head]];
    const weight = (root) => Math.sign(root) * root * root * highest;
    const values = thumbnails.half
      ? halves(new Uint16Array(bytes.buffer, start + 2 * head * cells, cells), 1).map(weight)
      : Float32Array.from(bytes.subarray(start + head * cells, start + (head + 1) * cells), (byte) => weight(byte / 255));
    return { row0: 0, column0: 0, rows, columns, rowBlock: 1, columnBlock: 1, values, highest, error: highest / 255 };
  }

  map(record, head) {
    const name = `${record}/${head}`;
    const map = this.maps.get(name) ?? this.build(record, head);
    this.maps.delete(name);
    this.maps.set(name, map);
    if (this.maps.size > 16) this.maps.delete(this.maps.keys().next().value);
    return map;
  }

  async build(record, head) {
    const pack = await this.unpack(record);
    const cells = pack.mapRows * pack.mapColumns;
    const codes = pack.codes.subarray(head * cells, (head + 1) * cells);
    const values = pack.half ? halves(codes, pack.peak) : new Float32Array(cells);
    for (let i = 0; i < pack.mapRows && !pack.half; i++) {
      const step = pack.steps[head * pack.mapRows + i];
      for (let j = 0; j < pack.mapColumns; j++) values[i * pack.mapColumns + j] = codes[i * pack.mapColumns + j] * step;
    }
    if (pack.whole && pack.kept) {
      for (let i = 0; i < pack.queries; i++) {
        const { indices, values: best } = this.largest(pack, head, i);
        for (let n = 0; n < indices.length; n++) values[i * pack.keys + indices[n]] = best[n];
      }
    }
    return {
      row0: 0, column0: 0, rows: pack.mapRows, columns: pack.mapColumns,
      rowBlock: pack.rowBlock, columnBlock: pack.columnBlock, values, highest: mostOf(values), error: pack.error,
    };
  }

  async tile(record, head, row0, column0, rows, columns) {
    const map = await this.map(record, head);
    return part(map, row0, column0, rows, columns);
  }

  async rows(record, head, row) {
    const pack = await this.unpack(record);
    const at = Math.min(pack.rowsKept - 1, Math.round(row / pack.stride));
    if (pack.whole) {
      const map = await this.map(record, head);
      const values = map.values.slice(row * pack.keys, (row + 1) * pack.keys);
      return { row, indices: null, values, rest: 0, error: pack.error };
    }
    const { indices, values } = this.largest(pack, head, at);
    const rest = pack.rests[head * pack.rowsKept + at];
    const error = pack.half ? pack.error : pack.peak / 131070;
    return { row: at * pack.stride, indices: Uint32Array.from(indices), values, rest, error };
  }

  async received(record, head) {
    const pack = await this.unpack(record);
    return pack.received.subarray(head * pack.keys, (head + 1) * pack.keys);
  }

  async picture(label) {
    const picture = this.pictures[label];
    return picture ? new Blob([decode(picture)], { type: "image/png" }) : null;
  }

  // The stored largest weights of a row, in descending order, with the indices of their keys.
  largest(pack, head, at) {
    const start = (head * pack.rowsKept + at) * pack.kept;
    const indices = pack.indices.subarray(start, start + pack.kept);
    const stored = pack.largest.subarray(start, start + pack.kept);
    const values = pack.half ? halves(stored, pack.peak) : Float32Array.from(stored, (v) => (v / 65535) * pack.peak);
    return { indices, values };
  }

  unpack(record) {
    if (!this.unpacked.has(record)) {
      const { pack } = this.about.records[record];
      const { heads } = pack; // number of heads, including the mean of all heads
      const views = decompress(decode(this.packs[record])).then(({ buffer }) => {
        let start = 0;
        const take = (type, length) => {
          const view = new type(buffer, start, length);
          // In the decompressed data, every array begins at a multiple of four bytes.
          start += Math.ceil((length * type.BYTES_PER_ELEMENT) / 4) * 4;
          return view;
        };
        const rows = heads * pack.rowsKept;
        return {
          ...pack,
          steps: take(Float32Array, heads * pack.mapRows),
          rests: take(Float32Array, rows),
          received: take(Float32Array, heads * pack.keys),
          indices: take(pack.keys > 65536 ? Uint32Array : Uint16Array, rows * pack.kept),
          largest: take(Uint16Array, rows * pack.kept),
          codes: take(pack.half ? Uint16Array : Uint8Array, heads * pack.mapRows * pack.mapColumns),
        };
      });
      this.unpacked.set(record, views);
    }
    return this.unpacked.get(record);
  }
}

// The cells of a grid that cover the given range of rows and columns.
export function part(grid, row0, column0, rows, columns) {
  const top = Math.floor(row0 / grid.rowBlock);
  const left = Math.floor(column0 / grid.columnBlock);
  const bottom = Math.min(grid.rows, Math.ceil((row0 + rows) / grid.rowBlock));
  const right = Math.min(grid.columns, Math.ceil((column0 + columns) / grid.columnBlock));
  const values = new Float32Array(Math.max(0, bottom - top) * Math.max(0, right - left));
  let n = 0;
  for (let i = top; i < bottom; i++) for (let j = left; j < right; j++) values[n++] = grid.values[i * grid.columns + j];
  const [row, column] = [top * grid.rowBlock, left * grid.columnBlock];
  return { ...grid, row0: row, column0: column, rows: bottom - top, columns: right - left, values };
}

// The weights of a query as { index, value } pairs: the non-finite weights first, then the others in descending order.
export function ranked(row) {
  const pairs = Array.from(row.values, (value, n) => ({ index: row.indices ? row.indices[n] : n, value }));
  const rank = ({ value }) => (Number.isFinite(value) ? 0 : 1);
  return pairs.sort((a, b) => rank(b) - rank(a) || (rank(a) ? 0 : b.value - a.value) || a.index - b.index);
}

export function decode(text) {
  const clean = text.trim();
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(clean);
  const binary = atob(clean);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

export async function decompress(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
