// The state of the page, such as the selection and the settings, shared by all its parts. Listeners receive the names
// of the entries that have changed.

export class State {
  constructor(values) {
    this.values = { ...values };
    this.listeners = new Set();
  }

  get(name) {
    return this.values[name];
  }

  set(changes) {
    const changed = new Set(Object.keys(changes).filter((name) => !same(this.values[name], changes[name])));
    if (!changed.size) return;
    Object.assign(this.values, changes);
    for (const listener of [...this.listeners]) listener(changed);
  }

  on(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

function same(a, b) {
  if (a === b) return true;
  if (Array.isArray(a) && Array.isArray(b)) return String(a) === String(b);
  if (!a || !b || typeof a !== "object" || typeof b !== "object") return false;
  return a.row === b.row && a.column === b.column && a.stage === b.stage;
}

// Returns a setting from an earlier visit, from the browser's storage or else from the page's address.
export function remembered(name) {
  try {
    const kept = localStorage.getItem(`regard.${name}`);
    if (kept) return kept;
  } catch {
    // the browser's storage is not available in a sandboxed frame or for some files
  }
  return new URLSearchParams(location.hash.slice(1)).get(name);
}

export function remember(name, value) {
  try {
    localStorage.setItem(`regard.${name}`, value);
    return;
  } catch {
    // the browser's storage is not available
  }
  const kept = new URLSearchParams(location.hash.slice(1));
  kept.set(name, value);
  try {
    history.replaceState(null, "", `#${kept}`);
  } catch {
    // a document without an address cannot store the setting in its address
  }
}
