// The entry of a standalone page: decodes its embedded data, and shows it.

import { decode, MemorySource } from "./source.js";
import { mount } from "./viewer.js";

// For each trace the sources of all its sequences.
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
