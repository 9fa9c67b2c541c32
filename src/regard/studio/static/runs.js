// A page for each run: curves while it trains, its result, its configuration and its model card.

import { el } from "/page/dom.js";
import { markdown } from "./card.js";
import { drawn } from "./curves.js";
import { json } from "./server.js";
import { fixed } from "./numbers.js";
import { named, say } from "./words.js";

const PAUSE = 3000; // milliseconds between two requests for the state of a run that trains

export async function open(place, kept) {
  const { runs } = await json("/api/runs");
  const known = runs.map((run, number) => ({ ...run, number })).filter(({ inputs }) => inputs);
  place.append(el("div", { class: "intro" }, el("h1", { text: say("runs") }), el("p", { text: say("runsHelp") })));
  if (!known.length) {
    place.append(el("div", { class: "card none" }, el("p", { text: say("noRuns") }), el("pre", { text: "regard demo\nregard studio RUN" })));
    return () => {};
  }
  const wanted = Number(location.hash.split("/")[2] || NaN);
  const chosen = known.find(({ number }) => number === wanted) ?? known.find(({ number }) => number === kept.run) ?? known[0];
  kept.run = chosen.number;
  const base = `/api/runs/${chosen.number}`;
  const head = el("section", { class: "card head", "aria-label": chosen.name });
  const failure = el("p", { class: "failure", role: "alert" });
  const curves = el("div", { class: "curves" });
  const rest = el("div", { class: "rest" });
  place.append(
    known.length > 1 ? el("nav", { class: "picker", "aria-label": say("runs") }, ...known.map((run) => el("a", { href: `#/runs/${run.number}`, "aria-current": run === chosen ? "true" : null }, el("strong", { text: run.name }), el("small", { text: run.task })))) : "",
    failure, head, el("h2", { class: "part", text: say("curves") }), curves, rest,
  );
  let timer = null;
  let closed = false;
  let about = null;
  let last = "";

  async function look() {
    try {
      if (!about?.finished) {
        const before = JSON.stringify({ ...about, changed: null });
        about = await json(base);
        if (closed) return;
        summary();
        if (JSON.stringify({ ...about, changed: null }) !== before) parts();
      }
      const found = await json(`${base}/curves`);
      if (closed) return;
      const now = JSON.stringify(found.series);
      if (now !== last) curves.replaceChildren(...drawn(found.series, about.labels));
      last = now;
      if (!found.series.length) curves.replaceChildren(el("p", { class: "quiet", text: say("noCurves") }));
      failure.textContent = "";
      if (found.more || !about.finished) timer = setTimeout(look, found.more ? 0 : PAUSE);
    } catch (error) {
      if (closed) return;
      failure.textContent = say("error", { reason: error.message });
      // the run's state is requested again later, because the server may be reachable by then
      timer = setTimeout(look, 2 * PAUSE);
    }
  }

  function summary() {
    const state = about.finished ? say("finished") : about.changed === null ? say("notBegun") : say("unfinished", { ago: span(about.changed) });
    head.replaceChildren(
      el("div", { class: "row between" }, el("h2", {}, about.name, el("small", { text: `${about.task} · ${about.about}` })), about.ready ? el("a", { class: "button", href: `#/ask/${chosen.number}`, text: say("askThis") }) : ""),
      el("p", { class: "row state" }, el("span", { class: `dot ${about.finished ? "done" : "open"}` }), el("span", { text: state }), el("span", { class: "small", title: about.weights, text: about.weights ? say("weightsUsed", { weights: named(about.weights.split(":")[0]) }) : say("notReady", { name: about.name }) })),
    );
  }

  function parts() {
    rest.replaceChildren(results(about), facts(about.facts), settings(about.config), card(about.card));
  }

  look();
  return () => {
    closed = true;
    clearTimeout(timer);
  };
}

function results({ figures, finished, unit }) {
  if (!figures.length) return el("section", { class: "card" }, el("h2", { text: say("result") }), el("p", { class: "quiet", text: say(finished ? "noFigures" : "resultLater") }));
  const parts = [...new Set(figures.map(({ part }) => part))];
  const keys = [...new Set(figures.map(({ group, name }) => `${group}/${name}`))];
  const at = (key, part) => figures.find((one) => `${one.group}/${one.name}` === key && one.part === part);
  const any = (key) => figures.find(({ group, name }) => `${group}/${name}` === key);
  const better = { higher: "↑", lower: "↓" };
  return el("section", { class: "card" }, el("h2", {}, say("result"), el("small", { text: say("betterHelp") })), el("div", { class: "scrolls" }, el("table", { class: "plain figures" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: say("figure") }), ...parts.map((part) => el("th", { scope: "col", class: "number", text: say(part === "test" ? "testPart" : "longerPart") })))),
    el("tbody", {}, ...keys.map((key) => {
      const { label, better: way, group, name } = any(key);
      const title = group === "faithfulness" ? say(name === "attended" ? "lostAttended" : "lostOther", { unit: named(unit) }) : named(label);
      return el("tr", {}, el("th", { scope: "row" }, title, way ? el("span", { class: "way", text: ` ${better[way]}`, title: say(way), "aria-label": say(way) }) : ""), ...parts.map((part) => el("td", { class: "number", text: at(key, part) ? value(at(key, part)) : "–" })));
    })))));
}

function value({ value: number, percent, group }) {
  if (number === null) return "–";
  // small numbers, such as a squared error, are displayed with four decimals
  const digits = number && Math.abs(number) < 0.1 ? 4 : 1;
  return percent ? `${fixed(100 * number, 1)} %` : fixed(number, group === "faithfulness" ? 2 : digits);
}

function facts(known) {
  const entries = Object.entries(known);
  if (!entries.length) return "";
  const shown = (name, fact) => (name.endsWith("seconds") ? span(fact) : typeof fact === "number" ? fact.toLocaleString("en-US") : String(fact));
  return el("section", { class: "card" }, el("h2", { text: say("facts") }), el("dl", { class: "facts-list" }, ...entries.flatMap(([name, fact]) => [el("dt", { text: say(`fact_${name}`) }), el("dd", { text: shown(name, fact) })])));
}

function settings(config) {
  return el("section", { class: "card" }, el("details", {}, el("summary", {}, el("h2", { text: say("configuration") }), el("small", { text: say("settingsCount", { count: config.length }) })), el("div", { class: "scrolls" }, el("table", { class: "plain settings" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: say("setting") }), el("th", { scope: "col", text: say("settingValue") }), el("th", { scope: "col", text: say("meaning") }))),
    el("tbody", {}, ...config.map(({ name, value: set, about }) => el("tr", {}, el("th", { scope: "row" }, el("code", { text: name })), el("td", { text: set === "" ? "–" : set }), el("td", { class: "small", text: about }))))))));
}

function card(text) {
  if (!text) return "";
  return el("section", { class: "card" }, el("details", {}, el("summary", {}, el("h2", { text: say("modelCard") })), el("div", { class: "markdown" }, ...markdown(text))));
}

function span(seconds) {
  if (seconds < 90) return say("seconds", { count: fixed(seconds, seconds < 10 ? 1 : 0) });
  if (seconds < 5400) return say("minutes", { count: fixed(seconds / 60, 1) });
  return say(seconds < 172800 ? "hours" : "days", { count: fixed(seconds / (seconds < 172800 ? 3600 : 86400), 1) });
}
