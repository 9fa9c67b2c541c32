// The frame of the studio: the menus of sections, languages and colours. A section is a function that fills an element
// and returns a function that is called when the user leaves the section.

import { choice, el } from "/page/dom.js";
import { remember, remembered } from "/page/state.js";
import { LANGUAGES, language, say, speak } from "./words.js";

const SECTIONS = ["playground", "views", "ask", "runs", "translate", "traces"];
const THEMES = ["auto", "light", "dark"];
const kept = {}; // the state of each section, which a change of the language or of the colours does not reset

let leave = () => {};
let turn = 0; // number of the last section change: a section that loads slowly must not replace a newer one

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = THEMES.includes(remembered("theme")) ? remembered("theme") : "auto";

speak(remembered("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
paint();
addEventListener("hashchange", show);
dark.addEventListener("change", () => {
  paint();
  show();
});
show();

function section() {
  const name = location.hash.replace(/^#\/?/, "").split("/")[0];
  return SECTIONS.includes(name) ? name : "playground";
}

async function show() {
  const mine = ++turn;
  const name = section();
  frame(name);
  leave();
  leave = () => {};
  const main = document.getElementById("main");
  const place = el("div", { class: `section ${name}` });
  main.replaceChildren(place);
  try {
    const { open } = await import(`./${name}.js`);
    if (mine !== turn) return;
    kept[name] ??= {};
    const done = (await open(place, kept[name])) ?? (() => {});
    if (mine === turn) leave = done;
    else done();
  } catch (error) {
    place.replaceChildren(el("p", { class: "failure", role: "alert", text: say("error", { reason: error.message }) }));
  }
}

function frame(name) {
  document.title = `${say(name)} · ${say("title")}`;
  document.querySelector(".skip").textContent = say("skip");
  const nav = el(
    "nav", { "aria-label": say("sections") },
    ...SECTIONS.map((id) => el("a", { href: `#/${id}`, text: say(id), "aria-current": id === name ? "page" : null })),
  );
  const mark = el("a", { class: "mark", href: "#/playground" }, el("img", { src: "/static/icon.svg", alt: "", width: 22, height: 22 }), "regard");
  const languages = choice(say("language"), LANGUAGES, language(), (value) => {
    remember("language", value);
    speak(value);
    show();
  }, "language");
  const themes = choice(say("theme"), THEMES.map((value) => ({ value, text: say(value) })), theme, (value) => {
    remember("theme", value);
    theme = value;
    paint();
    show();
  }, "theme");
  document.querySelector("header.top").replaceChildren(mark, nav, el("span", { class: "space" }), languages, themes);
}

// The light or dark theme is always set explicitly, so that scripts and styles need not query the system.
function paint() {
  document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
}
