// Every word the viewer says, in English and Chinese. {name} is filled in.

const EN = {
  language: "Language", theme: "Appearance", auto: "Auto", light: "Light", dark: "Dark",
  overview: "Layers and heads", maps: "Maps", measures: "Entropy and distance",
  overviewHelp: "Each row is a layer, each square a head. Choose one.",
  layerHead: "{name}, head {head}", head: "head {head}",
  view: "Picture", heatmap: "Heat map", lines: "Lines", text: "Text", image: "Image", sound: "Sound", scene: "Scene", gaze: "Gaze",
  scale: "Colour", linear: "linear", root: "square root", row: "each row", zoom: "Zoom", larger: "Larger", smaller: "Smaller",
  search: "Find a token", found: "{place} of {count}", none: "not found",
  save: "Save", png: "PNG", svg: "SVG", csv: "CSV",
  copy: "Copy values", copyHelp: "Copy the locked row, or the whole map", copied: "Copied", cannotCopy: "Copying was refused",
  savePng: "Save the picture as PNG", saveSvg: "Save the picture as SVG", saveCsv: "Save the values as CSV",
  check: "Check {value}", checkHelp: "Largest difference between weights × values and the model's real output, relative to the output.",
  noCheck: "No check", noCheckHelp: "Weights × values could not be compared with a real output.",
  size: "{queries} × {keys}", scaleIs: "scale {value}", kindIs: "seen as {value}",
  dropped: "Not in this page",
  looksAt: "looks at", lookedAt: "is looked at by",
  direction: "Direction", rest: "{count} others together", position: "position {place}",
  arrow: "“{row}” → “{column}”", mean: "mean {value}",
  locked: "locked", receivedBy: "“{column}” receives {value} on average",
  hint: "Point to read a value, click to lock it; arrow keys move the lock.",
  pictureOf: "{view} of {name}, head {head}: {queries} queries by {keys} keys. Arrow keys move, Escape unlocks.",
  precision: "Values here are within ±{error} of the model's; the {kept} largest of each row within ±{fine}.",
  within: "Values here are within ±{error} of the model's.",
  sequence: "Sequence", sequenceOf: "{number}: {text}",
  pooled: "A map of {queries} × {keys} is too large to keep whole: a cell is the mean of about {rows} × {columns} weights, and each row keeps its {kept} largest.",
  pooledTiles: "The whole map of {queries} × {keys} is shown pooled: a cell is the mean of about {rows} × {columns} weights. Enlarge it to see each one.",
  stride: "Of every {stride} rows one is kept; the nearest one is shown.",
  entropy: "entropy", distance: "distance", entropyAxis: "Entropy of the weights, nats (higher looks wider)",
  distanceAxis: "Distance looked, positions", orderAxis: "Layer", measuresOf: "{name}, head {head}: entropy {entropy}", farOf: ", distance {distance}",
  seconds: "{from}–{to} s", secondsUnit: "s",
  metres: "{value} m", speedOf: "{value} m/s", sceneHelp: "Seen from above: x to the right, y down. Colour and line width are the weight.",
  gazeHelp: "The path of the gaze, numbered from 0. Squares are what the retina shows of the image; beside it, the patches that it saw, from fine to coarse.",
  empty: "Nothing was seen: this trace has no records.", failed: "This picture could not be drawn: {reason}",
  received: "Tinted by the weight each token receives", tinted: "Tinted by what “{row}” looks at", asks: "What asks",
  largestOfRow: "largest of each row", most: "Received most", mostHelp: "mean weight over all queries",
};

const ZH = {
  language: "语言", theme: "外观", auto: "自动", light: "浅色", dark: "深色",
  overview: "层与头", maps: "注意力图", measures: "熵与距离",
  overviewHelp: "每行是一层，每个方块是一个头。请选择一个。",
  layerHead: "{name}，第 {head} 个头", head: "第 {head} 个头",
  view: "图", heatmap: "热图", lines: "连线", text: "文本", image: "图像", sound: "声音", scene: "场景", gaze: "视线",
  scale: "着色", linear: "线性", root: "平方根", row: "逐行", zoom: "缩放", larger: "放大", smaller: "缩小",
  search: "查找词元", found: "第 {place} 个，共 {count} 个", none: "未找到",
  save: "保存", png: "PNG", svg: "SVG", csv: "CSV", copy: "复制数值", copyHelp: "复制锁定的行，或整张图", copied: "已复制", cannotCopy: "浏览器不允许复制",
  savePng: "将图保存为 PNG", saveSvg: "将图保存为 SVG", saveCsv: "将数值保存为 CSV",
  check: "核对 {value}", checkHelp: "权重 × 值与模型真实输出之间的最大差异（相对于输出）。",
  noCheck: "未核对", noCheckHelp: "没有可与权重 × 值比较的真实输出。",
  size: "{queries} × {keys}", scaleIs: "缩放 {value}", kindIs: "捕获方式 {value}",
  dropped: "本页未包含",
  looksAt: "看向", lookedAt: "被谁看",
  direction: "方向", rest: "其余 {count} 个合计", position: "位置 {place}",
  arrow: "“{row}” → “{column}”", mean: "平均 {value}",
  locked: "已锁定", receivedBy: "“{column}” 平均得到 {value}",
  hint: "指向即读数，点击可锁定，方向键移动锁定。",
  pictureOf: "{view}：{name}，第 {head} 个头，{queries} 个查询 × {keys} 个键。方向键移动，Esc 解除锁定。",
  precision: "此处数值与模型相差不超过 ±{error}；每行最大的 {kept} 个不超过 ±{fine}。",
  within: "此处数值与模型相差不超过 ±{error}。",
  sequence: "序列", sequenceOf: "{number}：{text}",
  pooled: "{queries} × {keys} 的图太大，无法完整保存：每格是约 {rows} × {columns} 个权重的平均，每行保留最大的 {kept} 个。",
  pooledTiles: "{queries} × {keys} 的整图以汇聚方式显示：每格是约 {rows} × {columns} 个权重的平均。放大可看到每一个。",
  stride: "每 {stride} 行保留一行；显示最近的一行。",
  entropy: "熵", distance: "距离", entropyAxis: "权重的熵（奈特，越高看得越广）",
  distanceAxis: "注视距离（位置数）", orderAxis: "层", measuresOf: "{name}，第 {head} 个头：熵 {entropy}", farOf: "，距离 {distance}",
  seconds: "{from}–{to} 秒", secondsUnit: "秒",
  metres: "{value} 米", speedOf: "{value} 米/秒", sceneHelp: "俯视图：x 向右，y 向下。颜色与线宽表示权重。",
  gazeHelp: "视线的路径，从 0 开始编号。方框是视网膜看到的图像范围；旁边是它看到的图块，由细到粗。",
  empty: "没有看到注意力：此记录为空。", failed: "无法画出此图：{reason}",
  received: "按各词元得到的权重着色", tinted: "按“{row}”所看之处着色", asks: "提问方",
  largestOfRow: "每行的最大值", most: "得到最多", mostHelp: "对所有查询取平均",
};

const WORDS = { en: EN, zh: ZH };

// A function that says things in a language.
export function speaker(language) {
  const words = WORDS[language] ?? EN;
  const filled = (text, values) => text.replace(/\{(\w+)\}/g, (_, key) => String(values[key] ?? ""));
  return (name, values = {}) => filled(words[name] ?? EN[name] ?? name, values);
}
