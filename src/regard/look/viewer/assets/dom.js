// Functions that create elements of the page. Text from a trace is inserted as text and never parsed as HTML.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// A group of buttons of which one is pressed; arrow keys move between the buttons, as in a group of radio buttons. A
// choice may redraw the group, so the focus is restored by the group's name.
export function choice(label, options, current, choose, name = label) {
  const take = (value) => {
    choose(value);
    document.querySelector(`[data-choice="${name}"] [data-value="${value}"]`)?.focus();
  };
  const buttons = options.map(({ value, text, title }) =>
    el("button", {
      type: "button", role: "radio", text, title, "data-value": value,
      "aria-checked": String(value === current), tabindex: value === current ? "0" : "-1",
      onclick: () => take(value),
    }),
  );
  const press = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const place = buttons.indexOf(document.activeElement);
    if (!step || place < 0) return;
    event.preventDefault();
    take(options[(place + step + buttons.length) % buttons.length].value);
  };
  const group = { class: "choice", role: "radiogroup", "aria-label": label, "data-choice": name, onkeydown: press };
  return el("div", group, ...buttons);
}

// Replaces the children of an element, and restores the focus to the child with the same `data-here`. A text field
// keeps the position of its caret.
export function replaced(element, ...children) {
  const had = element.contains(document.activeElement) ? document.activeElement : null;
  const caret = had?.type === "search" ? had.selectionStart : null;
  element.replaceChildren(...children);
  const next = had?.dataset.here ? element.querySelector(`[data-here="${CSS.escape(had.dataset.here)}"]`) : null;
  next?.focus();
  if (next && caret !== null) next.setSelectionRange(caret, caret);
}

// Reports the width of an element, at once and after each change; returns a function that ends the reports.
export function whenResized(element, report) {
  let last = -1;
  const observer = new ResizeObserver(() => {
    const width = Math.floor(element.clientWidth);
    if (width !== last && width > 0) report((last = width));
  });
  observer.observe(element);
  return () => observer.disconnect();
}
