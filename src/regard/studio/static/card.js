// Converts the Markdown of a model card to page elements: headings, tables, lists, code and paragraphs. Text is never
// parsed as HTML, and links are not active.

import { el } from "/page/dom.js";

export function markdown(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  const until = (stop) => {
    const start = at;
    while (at < lines.length && !stop(lines[at])) at++;
    return lines.slice(start, at);
  };
  if (lines[0] === "---") { // the YAML front matter of the model card is skipped
    at = 1;
    blocks.push(el("pre", { text: until((line) => line === "---").join("\n") }));
    at++;
  }
  while (at < lines.length) {
    const line = lines[at];
    const heading = /^(#{1,6}) +(.*)$/.exec(line);
    if (!line.trim()) at++;
    else if (heading) {
      blocks.push(el(`h${Math.min(6, heading[1].length + 2)}`, { text: heading[2] }));
      at++;
    } else if (/^```/.test(line)) {
      at++;
      blocks.push(el("pre", { text: until((next) => /^```/.test(next)).join("\n") }));
      at++;
    } else if (line.startsWith("|")) blocks.push(table(until((next) => !next.startsWith("|"))));
    else if (/^[-*] /.test(line)) blocks.push(el("ul", {}, ...until((next) => !/^[-*] /.test(next)).map((item) => el("li", { text: item.slice(2) }))));
    else blocks.push(el("p", { text: until((next) => !next.trim() || /^(#{1,6} |```|\||[-*] )/.test(next)).join(" ") }));
  }
  return blocks;
}

function table(lines) {
  const rows = lines.filter((line) => !/^\|[\s:|-]*-[\s:|-]*\|?$/.test(line)).map(cells).filter((row) => row.some(Boolean));
  return el("div", { class: "scrolls" }, el("table", { class: "plain" }, el("tbody", {}, ...rows.map(([first, ...others]) => el("tr", {}, el("th", { scope: "row", text: first ?? "" }), ...others.map((text) => el("td", { text })))))));
}

function cells(line) {
  return line.replace(/^\|/, "").replace(/\|\s*$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
