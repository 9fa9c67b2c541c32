// Conversion of half floats to numbers by a table of all 65,536 values.

let table = null;

// The half floats in a Uint16Array as numbers, multiplied by `scale`.
export function halves(bits, scale) {
  table ??= Float32Array.from({ length: 65536 }, (_, n) => half(n));
  return Float32Array.from(bits, (n) => table[n] * scale);
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}
