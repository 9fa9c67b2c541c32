// The entry point of a standalone page: decodes the data in the page and shows the viewer.

import { decode, MemorySource } from "./source.js";
import { mount } from "./viewer.js";

// The sources of each trace: one source for each of its sequences.
const traces = [];
for (const element of document.querySelectorAll("script[data-about]")) {
  const trace = Number(element.dataset.about.split("-")[0]);
  const sequences = (traces[trace] ??= []);
  const about = JSON.parse(new TextDecoder().decode(decode(element.textContent)));
  const read = (kind, n) => document.querySelector(`script[data-${kind}="${trace}-${n}"]`)?.textContent;
  const packs = about.records.map((_, n) => read("record", about.blocks.records + n));
  const pictures = about.labels.map((_, n) => read("picture", about.blocks.pictures[n]));
  sequences.push(new MemorySource(about, packs, pictures, sequences));
}

mount(document.getElementById("regard"), traces.map(([first]) => first), {
  title: document.title,
  language: document.documentElement.lang.startsWith("zh") ? "zh" : "en",
});
