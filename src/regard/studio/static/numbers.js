// Functions that format numbers as text.

const MINUS = "−";

export function show(value, digits = 4) {
  if (!Number.isFinite(value)) return "–";
  const rounded = Number(value.toPrecision(digits));
  if (rounded === 0) return "0";
  if (Math.abs(rounded) < 5e-5) return "≈0";
  if (Math.abs(rounded) >= 1e6) return signed(rounded.toExponential(Math.min(2, digits - 1)).replace("e+", "e"));
  return signed(String(rounded));
}

export function fixed(value, digits = 3) {
  return Number.isFinite(value) ? signed(value.toFixed(digits)) : "–";
}

export function signed(text) {
  return text.replaceAll("-", MINUS);
}

export function vector(values, digits = 3) {
  const shown = values.slice(0, 8).map((value) => show(value, digits));
  return `[${shown.join(", ")}${values.length > 8 ? ", …" : ""}]`;
}
