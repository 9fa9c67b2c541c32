// A standalone page: read the data that lies in it, and show it.

import { decode, MemorySource } from "./source.js";
import { mount } from "./viewer.js";

const sources = [...document.querySelectorAll("script[data-about]")].map((element, trace) => {
  const about = JSON.parse(new TextDecoder().decode(decode(element.textContent)));
  const read = (kind, n) => document.querySelector(`script[data-${kind}="${trace}-${n}"]`)?.textContent;
  const packs = about.records.map((_, n) => read("record", n));
  const pictures = about.labels.map((_, n) => read("picture", n));
  return new MemorySource(about, packs, pictures);
});

mount(document.getElementById("regard"), sources, {
  title: document.title,
  language: document.documentElement.lang.startsWith("zh") ? "zh" : "en",
});
