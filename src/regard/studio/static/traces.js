// The section "traces" of the studio: it shows the traces given on the command line, and trace files that the user
// opens in the browser.

import { el } from "/page/dom.js";
import { ask, json } from "./server.js";
import { shown } from "./shown.js";
import { say } from "./words.js";

const MOST = 256; // largest size in MB of a trace file

export async function open(place, kept) {
  // The sections "ask" and "views" show the traces of answers and of runs, so these traces are omitted from the list of
  // this section.
  const traces = (await json("/api/traces")).traces.filter(({ origin }) => !["answer", "run"].includes(origin));
  const mine = traces.filter(({ origin }) => origin !== "example");
  const asked = location.hash.split("/")[2];
  const chosen = (mine.find(({ id }) => id === asked) ?? mine[0])?.id;
  const failure = el("p", { class: "failure", role: "alert" });
  const hand = async (file) => {
    if (!file) return;
    failure.textContent = "";
    const size = Math.ceil(file.size / 2 ** 20);
    if (size > MOST) {
      failure.textContent = say("error", { reason: say("tooLarge", { size, most: MOST }) });
      return;
    }
    try {
      const { id } = await json("/api/traces", { body: file });
      go(id);
    } catch (error) {
      failure.textContent = say("error", { reason: error.message });
    }
  };
  const opener = el("label", {
    class: "opener",
    ondragover: (event) => { event.preventDefault(); opener.classList.add("over"); },
    ondragleave: () => opener.classList.remove("over"),
    ondrop: (event) => { event.preventDefault(); opener.classList.remove("over"); hand(event.dataTransfer.files[0]); },
  }, el("input", { type: "file", onchange: (event) => hand(event.target.files[0]) }), el("strong", { text: say("open") }), say("drop"));
  const item = ({ id, title, origin }) => el("div", { class: "item" },
    el("a", { href: `#/traces/${id}`, "aria-current": id === chosen ? "true" : null }, el("strong", { text: title }), el("small", { text: say(origin === "given" ? "given" : "handedIn") })),
    origin === "given" ? null : el("button", {
      type: "button", class: "quiet close", text: "×", title: say("removeTrace", { name: title }), "aria-label": say("removeTrace", { name: title }),
      onclick: async () => { await ask(`/api/traces/${id}`, { method: "DELETE" }); go(""); },
    }));
  const stage = el("div");
  const others = traces.filter(({ id }) => id !== chosen);
  const beside = others.some(({ id }) => id === kept.beside) ? kept.beside : null;
  const compare = el("label", { class: "row small compare" }, say("compareWith"), el("select", {
    "data-name": "beside", onchange: (event) => { kept.beside = event.target.value || null; go(chosen); },
  }, el("option", { value: "", text: say("nobody") }), ...others.map(({ id, title }) => el("option", { value: id, text: title, selected: id === beside }))));
  place.append(
    el("div", { class: "intro" }, el("h1", { text: say("traces") }), el("p", { text: say("tracesHelp") })), failure,
    el("nav", { class: "picker", "aria-label": say("chooseTrace") }, ...mine.map(item), opener), chosen ? compare : "", stage,
  );
  if (!chosen) {
    stage.append(el("p", { class: "quiet", text: say("noTraces") }));
    return () => {};
  }
  kept[chosen] ??= {};
  return shown(stage, chosen, kept[chosen], null, beside);
}

// Opens the address of a trace. The browser sends no hashchange event if the address does not change, so this function
// sends the event.
function go(id) {
  const wanted = id ? `#/traces/${id}` : "#/traces";
  if (location.hash === wanted) dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = wanted;
}
