// The colour scale of heat maps, the same as in regard.look.color_scale: one hue, with perceptually equal steps. The
// lightness of an OKLCH colour (Ottosson 2020) is linear in the weight, so the order of two weights is visible in grey
// print and for colour-blind readers.

const HUE = (258 * Math.PI) / 180;
const BELOW = (48 * Math.PI) / 180; // the hue in degrees of negative weights, converted to radians
const ODD = { light: [199, 21, 133], dark: [255, 105, 200] }; // colours of NaN and infinite weights
const SCALES = {
  light: { lightness: [0.97, 0.4], chroma: [0.008, 0.17] },
  dark: { lightness: [0.25, 0.86], chroma: [0.02, 0.1] },
};
const THEMES = {
  light: {
    page: "#ffffff", text: "#1b1f24", quiet: "#626b78", line: "#e3e6eb", accent: "#1f5fc4", mark: "#1b1f24", warm: "#b4530a", odd: "rgb(199,21,133)",
  },
  dark: {
    page: "#14181e", text: "#e3e7ed", quiet: "#98a2b0", line: "#2b323c", accent: "#8ab4ff", mark: "#ffffff", warm: "#f0a35e", odd: "rgb(255,105,200)",
  },
};
// Hues of heads that are shown together, in degrees: adjacent entries differ strongly.
const HEADS = [258, 30, 150, 315, 80, 205, 355, 120, 285, 55, 180, 335];
const tables = {};

// 256 colours of the light or dark theme as [r, g, b], from the colour of weight 0 to that of the largest weight or,
// with `negative`, of the most negative weight.
export function table(theme, negative = false) {
  const name = `${theme}/${negative}`;
  tables[name] ??= Array.from({ length: 256 }, (_, n) => shade(n / 255, SCALES[theme], negative ? BELOW : HUE));
  return tables[name];
}

// The largest number of heads with distinguishable hues.
export const MOST_HEADS = HEADS.length;

// 256 colours in the n-th of the hues that distinguish heads, for weights from 0 to the largest.
export function headTable(n, theme) {
  const name = `${theme}/head/${n}`;
  tables[name] ??= Array.from({ length: 256 }, (_, step) => shade(step / 255, headScale(n, theme), radians(HEADS[n])));
  return tables[name];
}

// The colour of text on a cell in the n-th of the hues that distinguish heads; `share` is the weight divided by the
// largest weight.
export function headInk(share, n, theme) {
  return between(headScale(n, theme).lightness, share) > 0.565 ? "#000000" : "#ffffff";
}

// The colour scale of a head in the n-th hue; at the largest weight it has the colour of the head's lines. The hues of
// the second half of `HEADS` lie between those of the first half and are lighter, to be distinguishable from them.
function headScale(n, theme) {
  const light = (theme === "dark" ? 0.72 : 0.52) + (n < HEADS.length / 2 ? 0 : 0.15);
  const { lightness, chroma } = SCALES[theme];
  return { lightness: [lightness[0], light], chroma: [chroma[0], 0.17] };
}

// The n-th of the hues that distinguish heads, as a CSS colour that is strong enough for a line.
export function headColor(n, theme) {
  return `rgb(${headTable(n, theme)[255].join(",")})`;
}

function radians(degrees) {
  return (degrees * Math.PI) / 180;
}

// The colour of an attention weight as [r, g, b], from 0 to 255.
export function colorOf(value, highest, scale, theme) {
  if (!Number.isFinite(value)) return ODD[theme];
  return table(theme, value < 0)[Math.round(255 * stretch(value, highest, scale))];
}

// The colour of an attention weight as a CSS colour.
export function tint(value, highest, scale, theme) {
  return `rgb(${colorOf(value, highest, scale, theme).join(",")})`;
}

// The colour of text on a background that has the colour of an attention weight.
export function inkOf(value, highest, scale, theme) {
  if (!Number.isFinite(value)) return theme === "dark" ? "#000000" : "#ffffff";
  return ink(stretch(value, highest, scale), theme);
}

// The largest finite |weight|.
export function mostOf(values) {
  let found = 0;
  for (const value of values ?? []) if (Math.abs(value) > found && Number.isFinite(value)) found = Math.abs(value);
  return found;
}

export function palette(theme) {
  return THEMES[theme];
}

// The CSS colour of a share: a weight divided by the largest weight, from 0 to 1.
export function css(share, theme) {
  const [red, green, blue] = table(theme)[Math.round(255 * Math.min(1, Math.max(0, share)))];
  return `rgb(${red},${green},${blue})`;
}

// The colour of text on the colour of a weight: black on light and white on dark colours. It changes from black to
// white at the lightness at which black and white text both have a contrast of 4.5 : 1.
export function ink(share, theme) {
  return between(SCALES[theme].lightness, Math.min(1, Math.max(0, share))) > 0.565 ? "#000000" : "#ffffff";
}

// The position of a weight on the colour scale, from 0 to 1; the sign is ignored. The scale "root" enlarges small
// weights. Non-finite weights are at 1.
export function stretch(value, highest, scale) {
  if (!Number.isFinite(value)) return 1;
  const share = highest > 0 ? Math.min(1, Math.abs(value) / highest) : 0;
  return scale === "root" ? Math.sqrt(share) : share;
}

function shade(share, scale, hue) {
  const lightness = between(scale.lightness, share);
  const chroma = between(scale.chroma, share);
  const a = chroma * Math.cos(hue);
  const b = chroma * Math.sin(hue);
  const long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    byte(4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short),
    byte(-1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short),
    byte(-0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short),
  ];
}

function between(ends, share) {
  return ends[0] + (ends[1] - ends[0]) * share;
}

function byte(linear) {
  const inside = Math.min(1, Math.max(0, linear));
  const encoded = inside <= 0.0031308 ? 12.92 * inside : 1.055 * inside ** (1 / 2.4) - 0.055;
  return Math.round(255 * encoded);
}
