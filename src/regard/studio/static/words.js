// Every text of the studio in English and Chinese. {name} stands for a value that is inserted.

const EN = {
  title: "regard studio", skip: "Skip to the content", language: "Language", theme: "Colours",
  auto: "Auto", light: "Light", dark: "Dark", sections: "Sections",
  playground: "Playground", views: "Views", translate: "Translate", traces: "Traces",
  playgroundHelp: "Attention in three stages. Change anything: every number is computed again by regard.attention.",
  viewsHelp: "What runs look at for their own example, and demonstrations. Demonstrations are not trained models: they are made so that what ought to be looked at is known.",
  viewsOfRuns: "Runs", viewOfRun: "A trained run, its own example.", demonstrations: "Demonstrations",
  translateHelp: "Edit the source and see the translation follow. Choose a word to see what else could have come, or force it.",
  tracesHelp: "Open a trace file that regard.watch saved. Maps of any size are scrolled piece by piece.",
  error: "That did not work: {reason}", working: "Working…", offline: "the studio does not answer: is it still running?",
  inputs: "Inputs", input: "Input", vectors: "Vectors", sentence: "Sentence", sentenceLabel: "Sentence",
  sentenceHelp: "Each word asks all words. Its vector is made of its letters, so words that are spelled alike score high.",
  queries: "Queries", keys: "Keys", values: "Values", sameValues: "Values are the keys", query: "query", key: "key", value: "value",
  addQuery: "Add a query", addKey: "Add a key", remove: "Remove {name}", nameOf: "Name of {kind} {n}", component: "{name}, component {n}",
  size: "Size", longer: "One component more", shorter: "One component less", example: "Tom and Jerry", exampleHelp: "Back to the worked example",
  dragHelp: "Drag a number up or down, type it, or use the arrow keys. Drag the tips of the arrows.",
  plane: "Plane of components {x} and {y}", horizontal: "across", vertical: "up", planeTip: "{name}: {x}, {y}. Arrow keys move it.",
  how: "How to attend", score: "Score", normalize: "Normaliser", temperature: "Temperature", mask: "Mask", heads: "Heads", headNumber: "Head {n}", head: "Head",
  dot: "dot", scaled_dot: "scaled dot", cosine: "cosine", bilinear: "bilinear", additive: "additive",
  softmax: "softmax", sparsemax: "sparsemax", entmax: "entmax 1.5", sigmoid: "sigmoid", hard: "hard",
  none: "none", causal: "causal", window: "window", padding: "padding", before: "before", after: "after", length: "length",
  stage1: "Scores", stage1Help: "How well does each key answer?", arrows: "As arrows",
  stage2: "Weights", stage2Help: "Scores become shares.", stage3: "Output", stage3Help: "The values, summed by weight.",
  sum: "sum", masked: "masked: may not be attended", nothing: "nothing to attend: the output is zero",
  cellOf: "{row} → {column}: {value}", learned: "Parameters (a model would learn them; these are drawn once)",
  code: "The same in Python", backend: "computed by the {backend} backend", copy: "Copy", copied: "Copied",
  hardIs: "1 for the best key, 0 for all others", otherwise: "otherwise", where: "where {what}",
  run: "Run", compareWith: "Compare with", nobody: "nothing", beams: "Beams", source: "Source", target: "Translation",
  toyHelp: "No run was given, so these are toys of thirty words made by hand. Start with: regard studio RUN",
  alternatives: "Instead of “{word}”", chance: "probability", force: "Force this word", forceOther: "Another word", forced: "Forced: {words}",
  release: "Release", hypotheses: "Hypotheses", logProb: "log p", emptyTarget: "(nothing)", otherWords: "Other words", chooseWord: "Choose a word of the translation to see what else could have come.",
  incomparable: "Same words at {same} of {all} places; weights cannot be compared: {why}.",
  otherWordsAll: "no place has the same word", bothEmpty: "both translations are empty", otherPieces: "the runs cut the source into different pieces ({one} and {two})",
  agreement: "Same words at {same} of {all} places; weights differ by {difference} on average.", linesHelp: "The thicker a line, the larger the weight.",
  weightsOf: "Weights", looksAt: "“{row}” looks at {list}",
  image: "Image", sound: "Sound", sentiment: "Classification", reading: "Spans", scene: "Traffic",
  imageHelp: "A caption: each word has its own map over the picture.", soundHelp: "Speech: which frames each letter was heard in.",
  sentimentHelp: "Which words of a review speak for each class.", readingHelp: "Where the answer starts and ends, and what each word has to do with the question.",
  sceneHelp: "Which road user makes the driver brake.",
  faithful: "Is it an explanation?", faithfulHelp: "A map is pretty whether or not the model used it. So the model is asked again, without what the map points at, and with that alone.",
  faithfulFor: "For “{row}”, head {head}", faithfulWord: "For “{word}”", deletion: "Deletion", deletionHelp: "score as inputs are removed: should fall fast",
  sufficiency: "Sufficiency", sufficiencyHelp: "score with those inputs alone: should rise fast", fraction: "fraction of the inputs", scoreAxis: "score",
  map: "this map", random: "random", area: "area", gradient: "gradient × input", gain: "Better than random by {value}.",
  gainOver: "Better than gradient × input by {value}.", lossTo: "Gradient × input is better by {value}.", even: "About as good as gradient × input.",
  worse: "No better than removing at random: do not take this map for an explanation.",
  noModel: "A trace keeps where a model looked, not the model: faithfulness needs a run, or an example of the Views.",
  open: "Open a trace file", drop: "or drop one here", origin: "Where from", given: "given at the start", handedIn: "opened here", examples: "example",
  noTraces: "No trace yet. Save one with regard.watch(model) … trace.save(\"my.trace\"), then open it here.",
  removeTrace: "Close {name}", chooseTrace: "Traces", opening: "Opening…", tooLarge: "the file has {size} MB; at most {most} can be opened",
  ask: "Ask", askHelp: "Give a run its input, and see the answer and where the model looked for it.", askButton: "Ask", askKeys: "Enter asks", askKeysLong: "Ctrl + Enter asks",
  runPage: "Curves, result and card of this run", fillIn: "Every input must be filled in.", whereLooked: "Where it looked",
  notReady: "{name} cannot answer yet: its training has written no checkpoint.", noMap: "This run has no attention: there is no map.",
  noRuns: "No run was given. Train one, then start the studio with it:", emptyAnswer: "(nothing)", scoreOf: "score", record: "Record", moreEntries: "{count} more",
  chooseImage: "Choose an image", chooseSound: "Choose a sound", fileTooLarge: "the file has {size} MB; at most {most} can be sent",
  dropOrPaste: "or drop or paste it here", pasted: "pasted", useExample: "Use the example", exampleOf: "example of {name}",
  recordSound: "Record", stopRecording: "Stop", recording: "recording", noMicrophone: "the microphone cannot be used",
  runs: "Runs", runsHelp: "How a run learned, what came of it, and what it was asked to do.", curves: "Curves", noCurves: "No figures have been written yet.",
  askThis: "Ask this run", finished: "Training has ended.", unfinished: "Training has not ended; the last figures are {ago} old.", notBegun: "Training has written no figures yet.",
  weightsUsed: "Answers with: {weights}.", result: "Result", resultLater: "The result is written when training ends.", noFigures: "The result has no figures.",
  betterHelp: "↑ higher is better, ↓ lower is better", higher: "higher is better", lower: "lower is better", figure: "Figure", testPart: "test", longerPart: "longer than trained",
  lostAttended: "log-probability lost without the {unit} attended most", lostOther: "log-probability lost without another {unit}",
  facts: "About this run", configuration: "Configuration", settingsCount: "{count} settings", setting: "Setting", settingValue: "Value", meaning: "Meaning", modelCard: "Model card",
  fact_data: "Data", fact_parameters: "Parameters", fact_steps: "Steps", fact_ended: "Ended by", fact_training_seconds: "Training", fact_seconds: "Training and test", fact_device: "Device", fact_seed: "Seed", fact_command: "Command",
  seconds: "{count} s", minutes: "{count} min", hours: "{count} h", days: "{count} days",
  loss: "Loss", learningRate: "Learning rate", gradientNorm: "Gradient norm", tokensPerSecond: "Tokens per second", training: "training", validation: "validation", step: "Step",
  curveOf: "{title} until step {step}: {newest}. Arrow keys read it step by step.", meanOf: "Each point is the mean of {count} lines.",
};

const ZH = {
  title: "regard 工作室", skip: "跳到内容", language: "语言", theme: "配色",
  auto: "自动", light: "浅色", dark: "深色", sections: "栏目",
  playground: "演练场", views: "视图", translate: "翻译", traces: "记录",
  playgroundHelp: "注意力的三个阶段。改动任何一处，所有数值都由 regard.attention 重新计算。",
  viewsHelp: "训练出的模型在自己的示例上看了哪里，以及演示。演示不是训练出的模型：应当看哪里是已知的。",
  viewsOfRuns: "模型", viewOfRun: "训练出的模型，它自己的示例。", demonstrations: "演示",
  translateHelp: "修改原文，译文随之变化。点选一个词，看看还可能是什么，或强制使用它。",
  tracesHelp: "打开 regard.watch 保存的记录文件。再大的图也可以逐块滚动查看。",
  error: "没有成功：{reason}", working: "计算中…", offline: "工作室没有回应：它还在运行吗？",
  inputs: "输入", input: "输入", vectors: "向量", sentence: "句子", sentenceLabel: "句子",
  sentenceHelp: "每个词询问所有词。词的向量由字母组成，因此拼写相近的词得分高。",
  queries: "查询", keys: "键", values: "值", sameValues: "值与键相同", query: "查询", key: "键", value: "值",
  addQuery: "添加查询", addKey: "添加键", remove: "删除 {name}", nameOf: "{kind} {n} 的名称", component: "{name}，分量 {n}",
  size: "维数", longer: "增加一维", shorter: "减少一维", example: "汤姆和杰瑞", exampleHelp: "回到示例",
  dragHelp: "上下拖动数字、直接输入或用方向键修改；也可拖动箭头的尖端。",
  plane: "分量 {x} 与 {y} 的平面", horizontal: "横轴", vertical: "纵轴", planeTip: "{name}：{x}，{y}。方向键移动。",
  how: "如何注意", score: "打分", normalize: "归一化", temperature: "温度", mask: "掩码", heads: "头数", headNumber: "头 {n}", head: "头",
  dot: "点积", scaled_dot: "缩放点积", cosine: "余弦", bilinear: "双线性", additive: "加性",
  softmax: "softmax", sparsemax: "sparsemax", entmax: "entmax 1.5", sigmoid: "sigmoid", hard: "硬注意力",
  none: "无", causal: "因果", window: "窗口", padding: "填充", before: "之前", after: "之后", length: "长度",
  stage1: "打分", stage1Help: "每个键回答得有多好？", arrows: "箭头",
  stage2: "权重", stage2Help: "分数变为份额。", stage3: "输出", stage3Help: "按权重对值求和。",
  sum: "合计", masked: "被遮住：不可注意", nothing: "没有可注意的键：输出为零",
  cellOf: "{row} → {column}：{value}", learned: "参数（模型会学习它们；这里随机取定一次）",
  code: "同样的 Python 代码", backend: "由 {backend} 后端计算", copy: "复制", copied: "已复制",
  hardIs: "最好的键为 1，其余为 0", otherwise: "其余", where: "其中 {what}",
  run: "模型", compareWith: "对比", nobody: "不对比", beams: "束宽", source: "原文", target: "译文",
  toyHelp: "没有给出模型，这里是手工制作的三十个词的玩具。启动方式：regard studio RUN",
  alternatives: "替换“{word}”", chance: "概率", force: "强制使用此词", forceOther: "其他词", forced: "已强制：{words}",
  release: "解除", hypotheses: "候选译文", logProb: "log p", emptyTarget: "（空）", otherWords: "其他可能", chooseWord: "点选译文中的一个词，看看还可能是什么。",
  incomparable: "{all} 处中 {same} 处用词相同；权重无法比较：{why}。",
  otherWordsAll: "没有一处用词相同", bothEmpty: "两个译文都是空的", otherPieces: "两个运行对原文的切分不同（{one} 与 {two} 个片段）",
  agreement: "{all} 处中 {same} 处用词相同；权重平均相差 {difference}。", linesHelp: "线越粗，权重越大。",
  weightsOf: "权重", looksAt: "“{row}”看向 {list}",
  image: "图像", sound: "声音", sentiment: "分类", reading: "片段", scene: "交通",
  imageHelp: "图像描述：每个词在图上各有一幅注意力图。", soundHelp: "语音：每个字母是在哪些帧里听到的。",
  sentimentHelp: "评论中哪些词支持每个类别。", readingHelp: "答案从哪里开始、到哪里结束，每个词与问题有何关系。",
  sceneHelp: "是哪个道路使用者让驾驶者刹车。",
  faithful: "这算解释吗？", faithfulHelp: "无论模型是否用到，图都一样好看。因此再问模型一次：去掉图所指之处，或只保留它。",
  faithfulFor: "“{row}”，头 {head}", faithfulWord: "“{word}”", deletion: "删除", deletionHelp: "去掉输入时的得分：应当快速下降",
  sufficiency: "充分", sufficiencyHelp: "只保留这些输入时的得分：应当快速上升", fraction: "输入的比例", scoreAxis: "得分",
  map: "本图", random: "随机", area: "面积", gradient: "梯度 × 输入", gain: "比随机好 {value}。",
  gainOver: "比梯度 × 输入好 {value}。", lossTo: "梯度 × 输入好 {value}。", even: "与梯度 × 输入相当。",
  worse: "并不比随机删除更好：不要把这幅图当作解释。",
  noModel: "记录只保存模型看了哪里，不保存模型：忠实度需要模型，或“视图”中的示例。",
  open: "打开记录文件", drop: "或拖放到这里", origin: "来源", given: "启动时给出", handedIn: "在此打开", examples: "示例",
  noTraces: "还没有记录。用 regard.watch(model) … trace.save(\"my.trace\") 保存一个，再在这里打开。",
  removeTrace: "关闭 {name}", chooseTrace: "记录", opening: "打开中…", tooLarge: "文件有 {size} MB；最多可打开 {most} MB",
  ask: "提问", askHelp: "给模型一个输入，看它的回答，以及它看了哪里。", askButton: "提问", askKeys: "Enter 提问", askKeysLong: "Ctrl + Enter 提问",
  runPage: "此模型的曲线、结果与说明", fillIn: "每一项输入都要填写。", whereLooked: "它看了哪里",
  notReady: "{name} 还不能回答：训练尚未写出检查点。", noMap: "此模型没有注意力，因此没有图。",
  noRuns: "没有给出模型。先训练一个，再用它启动工作室：", emptyAnswer: "（空）", scoreOf: "得分", record: "记录", moreEntries: "还有 {count} 项",
  chooseImage: "选择图像", chooseSound: "选择声音", fileTooLarge: "文件有 {size} MB；最多可发送 {most} MB",
  dropOrPaste: "或拖放、粘贴到这里", pasted: "粘贴的图像", useExample: "使用示例", exampleOf: "{name} 的示例",
  recordSound: "录音", stopRecording: "停止", recording: "录音", noMicrophone: "无法使用麦克风",
  runs: "模型", runsHelp: "模型如何学习、结果如何、用了哪些设置。", curves: "曲线", noCurves: "还没有写出任何数值。",
  askThis: "向它提问", finished: "训练已结束。", unfinished: "训练尚未结束；最新数值写于 {ago}前。", notBegun: "训练还没有写出数值。",
  weightsUsed: "回答所用权重：{weights}。", result: "结果", resultLater: "训练结束时写出结果。", noFigures: "结果中没有数值。",
  betterHelp: "↑ 越高越好，↓ 越低越好", higher: "越高越好", lower: "越低越好", figure: "指标", testPart: "测试", longerPart: "比训练更长",
  lostAttended: "去掉最受注意的{unit}所损失的对数概率", lostOther: "去掉另一个{unit}所损失的对数概率",
  facts: "关于此模型", configuration: "配置", settingsCount: "{count} 项设置", setting: "设置", settingValue: "值", meaning: "含义", modelCard: "模型卡",
  fact_data: "数据", fact_parameters: "参数量", fact_steps: "步数", fact_ended: "结束原因", fact_training_seconds: "训练用时", fact_seconds: "训练与测试用时", fact_device: "设备", fact_seed: "随机种子", fact_command: "命令",
  seconds: "{count} 秒", minutes: "{count} 分钟", hours: "{count} 小时", days: "{count} 天",
  loss: "损失", learningRate: "学习率", gradientNorm: "梯度范数", tokensPerSecond: "每秒词元数", training: "训练", validation: "验证", step: "步",
  curveOf: "{title}，至第 {step} 步：{newest}。方向键逐步读取。", meanOf: "每个点是 {count} 行的平均。",
};

// Chinese names of inputs and metrics; a name that is not in this list is shown unchanged.
const NAMES = {
  Sentence: "句子", Text: "文本", Review: "评论", Passage: "文章", Story: "故事", Question: "问题", Image: "图像", Picture: "图像", Photo: "照片", Sound: "声音", Recording: "录音", Scene: "场景",
  accuracy: "准确率", "exact match": "完全匹配", "exactly as the reference": "与参考完全相同", "alignment error rate": "对齐错误率", "alignment error rate, the word known": "对齐错误率（已知该词）",
  "source word": "源词", word: "词", "final weights": "最终权重", "rationale F1": "依据 F1", pointing: "指向准确率", "word error rate": "词错误率", "character error rate": "字错误率",
  "exactly as a reference": "与某个参考完全相同", "BLEU by sacrebleu": "sacrebleu 的 BLEU", "pointing at what is asked about": "指向所问之处", "pointing at the sentence that answers": "指向作答的句子",
  "collisions per 100 km": "每百公里碰撞", "collisions per 100 km, expert": "每百公里碰撞（专家）", "collisions per 100 km, random policy": "每百公里碰撞（随机）", "collisions per 100 km, idle policy": "每百公里碰撞（不动作）", progress: "行程完成", "progress, expert": "行程完成（专家）", "progress, random policy": "行程完成（随机）", "progress, idle policy": "行程完成（不动作）",
  "km driven": "行驶公里", "km driven, expert": "行驶公里（专家）", "km driven, random policy": "行驶公里（随机）", "km driven, idle policy": "行驶公里（不动作）", "agreement with the expert": "与专家一致", "error of the steering": "转向误差", "pointing at what forces the decision": "指向决定因素", object: "物体",
  "pixels read": "读取的像素", "last gaze on the digit": "最后一眼落在数字上", cell: "格", "cell of the picture": "图中一格", "word of the passage": "文中一词",
  "without an error": "无错误", "attention within 50 ms": "注意力在 50 毫秒内", "least certain symbol is wrong, where one is": "有错时最不确定的符号是错的", "a symbol at random is wrong, where one is": "有错时随机一个符号是错的", frame: "帧",
};

const ALL = { en: EN, zh: ZH };
let current = "en";

export const LANGUAGES = [
  { value: "en", text: "English" },
  { value: "zh", text: "中文" },
];

export function speak(language) {
  current = ALL[language] ? language : "en";
  document.documentElement.lang = current === "zh" ? "zh-CN" : "en";
}

export function language() {
  return current;
}

export function say(name, fields = {}) {
  const text = ALL[current][name] ?? EN[name] ?? name;
  return text.replace(/\{(\w+)\}/g, (whole, field) => (field in fields ? String(fields[field]) : whole));
}

// Returns the name of an input or a metric in the current language.
export function named(label) {
  return current === "zh" ? (NAMES[label] ?? label) : label;
}

// Returns the names of texts that exist in one language only; a test checks that no such text exists.
export function missing() {
  const [en, zh] = [Object.keys(EN), Object.keys(ZH)];
  return [...en.filter((name) => !(name in ZH)), ...zh.filter((name) => !(name in EN))];
}
