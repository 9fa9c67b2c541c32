"""The words and sentence patterns of the generated reviews, in English and in Chinese.

A pattern is a string of words and placeholders separated by blanks. The placeholder `{name}` is replaced by a random
entry of the list with that name. A star marks the words that decide the review's label, if their clause decides it.
English entries are split into words, Chinese entries into characters.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Grammar(NamedTuple):
    """The lists of words of one language by name, and the sentence patterns into which the words are inserted."""

    entries: Mapping[str, tuple[str, ...]]
    plain: tuple[str, ...]  # patterns in which {opinion} is not negated
    turned: tuple[str, ...]  # patterns in which {opinion} is negated
    excess: tuple[str, ...]  # patterns that are negative with any {measure}, such as "too long"
    enough: tuple[str, ...]  # patterns that are positive with any {measure}, such as "long enough"
    neutral: tuple[str, ...]
    # patterns of two clauses {first} and {second} with equal opinions; the words of both clauses decide the label
    together: tuple[str, ...]
    # patterns of a clause {main}, which decides the label, and a clause {side} with the opposite opinion
    contrast: tuple[str, ...]
    fillers: tuple[str, ...]  # sentences without opinion words, which do not affect the label
    distractors: tuple[str, ...]  # sentences with opinion words, negations or intensifiers, but without an opinion
    held: tuple[str, ...]  # patterns that state an opinion and who holds it
    facts: tuple[str, ...]  # sentences that mention a person but state no opinion
    stop: str


def _entries(table: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(entry.strip() for entry in table.replace("\n", separator).split(separator) if entry.strip())


def _patterns(table: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in table.strip().splitlines())


_ENGLISH_ENTRIES = {
    "positive": _entries(
        """good, great, excellent, brilliant, wonderful, superb, moving, charming, delightful, clever, fresh, gripping
        funny, touching, elegant, impressive, lovely, stunning, inspired, rich, sincere, warm, bold, memorable
        splendid, perfect, amazing, fantastic, beautiful, graceful, witty, absorbing, exciting, pleasant, comfortable
        reliable, generous, vivid, tasteful, remarkable, enjoyable, outstanding, polished, captivating, refreshing"""
    ),
    "negative": _entries(
        """bad, poor, awful, terrible, dull, boring, weak, clumsy, tedious, shallow, stale, annoying
        lifeless, predictable, ugly, messy, painful, lazy, cheap, noisy, dirty, rude, bland, pointless
        horrible, disappointing, confusing, tiresome, careless, sloppy, forgettable, dreadful, flat, empty, silly
        unpleasant, broken, cold, overpriced, unreliable, mediocre, irritating, awkward, wooden, ridiculous"""
    ),
    "measure": _entries("long, short, loud, quiet, slow, fast, dark, bright, small, large, hot, sweet, thick, heavy"),
    "okay": _entries("average, ordinary, acceptable, passable, so-so, middling, unremarkable, standard"),
    "aspect": _entries(
        """acting, plot, music, script, ending, story, cast, dialogue, photography, pace, soundtrack, room, service
        breakfast, kitchen, staff, menu, soup, dessert, screen, battery, keyboard, camera, design, case, cover
        translation, style, index, chapter, binding, garden, pool, lobby, view, sauce, bread, coffee, manual, speaker"""
    ),
    "very": _entries("very, really, quite, truly, remarkably, so, extremely, rather"),
    "not": _entries("not, never, hardly, scarcely"),
    "thing": _entries("film, book, hotel, phone, restaurant, laptop, novel, play, album, camera, meal, series"),
    "person": _entries("sister, brother, neighbour, uncle, teacher, friend, colleague, cousin, wife, husband, son"),
    "trait": _entries("leg, tooth, knee, back, ear, eye, shoulder, hand"),
    "place": _entries("london, paris, berlin, town, the village, the station, the airport, beijing, rome, the harbour"),
    "day": _entries("monday, tuesday, friday, sunday, my birthday, a holiday, the first day, new year"),
    "number": _entries("two, three, four, five, six, ten, twelve, twenty, ninety"),
    "own": _entries("i, we"),
    "own_object": _entries("me, us"),
    "others": _entries("critics, reporters, tourists, students, neighbours, experts, judges, fans, teachers, editors"),
}

ENGLISH = Grammar(
    entries=_ENGLISH_ENTRIES,
    plain=_patterns(
        """the {aspect} is *{opinion}
        the {aspect} was *{opinion}
        the {aspect} is {very} *{opinion}
        the {aspect} was {very} *{opinion}
        i found the {aspect} *{opinion}
        we found the {aspect} {very} *{opinion}
        the {aspect} seems *{opinion} to me
        i would call the {aspect} *{opinion}
        i find the {aspect} *{opinion}
        anyone could call the {aspect} *{opinion}"""
    ),
    turned=_patterns(
        """the {aspect} is *{not} *{opinion}
        the {aspect} was *{not} *{opinion}
        the {aspect} was *{not} {very} *{opinion}
        the {aspect} *isn't *{opinion}
        the {aspect} *isn't {very} *{opinion}
        i *didn't find the {aspect} *{opinion}
        i would *not call the {aspect} *{opinion}
        *nobody could call the {aspect} *{opinion}"""
    ),
    excess=_patterns("the {aspect} is *too *{measure}\nthe {aspect} was far *too *{measure}"),
    enough=_patterns("the {aspect} is *{measure} *enough\nthe {aspect} was just *{measure} *enough"),
    neutral=_patterns(
        """the {aspect} is *{okay}
        the {aspect} was {very} *{okay}
        i found the {aspect} *{okay}
        the {aspect} is *neither *{positive} *nor *{negative}"""
    ),
    together=_patterns("{first} and {second}\n{first} , and {second}"),
    contrast=_patterns(
        """{side} but {main}
        {side} , but {main}
        {side} , yet {main}
        although {side} , {main}
        {main} , although {side}
        {main} , even though {side}"""
    ),
    fillers=_patterns(
        """i bought it in {place}
        we saw it on {day}
        it came with a {thing} and a {thing}
        my {person} sat beside me
        the {thing} is about a {person} from {place}
        it was made in {place}
        there are {number} chapters
        the {thing} has {number} parts
        it took {number} days
        my {person} ordered it on {day}
        this is the {thing} from {place}
        a ticket was {number} dollars"""
    ),
    distractors=_patterns(
        """a {any} {person} lent it to me
        it is about a {any} {person} in {place}
        the hero has a {any} {trait}
        my {any} {person} came too
        we did not see it in {place}
        it was not made in {place}
        i never went there on {day}
        the {thing} tells of a {any} storm
        it isn't the {thing} from {place}
        the {thing} weighs {very} little
        there is enough water in {place}
        the {any} {thing} is the name of a bar
        the road there was {very} {measure}
        we went there but not on {day}
        i know a {any} {person} but not from {place}"""
    ),
    held=_patterns(
        """*{holder} find the {aspect} {any}
        *{holder} call the {aspect} {very} {any}
        *{holder} think the {aspect} is {any}
        to *{object} the {aspect} is {any}
        for *{object} the {aspect} is {very} {any}"""
    ),
    facts=_patterns(
        """{holder} saw it in {place}
        {holder} came to {place} on {day}
        {holder} have {number} copies
        it was sent to {object} on {day}
        for {object} a ticket is {number} dollars
        to {object} it came on {day}"""
    ),
    stop=".",
)

_CHINESE_ENTRIES = {
    "positive": _entries(
        """精彩, 出色, 感人, 有趣, 优秀, 完美, 舒服, 漂亮, 干净, 周到, 可靠, 精致, 美味, 流畅, 生动, 温馨
        迷人, 动听, 清晰, 细腻, 丰富, 自然, 大方, 贴心, 真诚, 难忘, 幽默, 巧妙, 雅致, 震撼, 满意, 新颖"""
    ),
    "negative": _entries(
        """糟糕, 无聊, 乏味, 拖沓, 老套, 混乱, 难看, 难吃, 肮脏, 粗糙, 吵闹, 空洞, 生硬, 做作, 平淡, 陈旧
        恶劣, 刺耳, 模糊, 失望, 俗气, 敷衍, 虚假, 冷漠, 古怪, 笨拙, 廉价, 破旧, 沉闷, 啰嗦, 幼稚, 马虎"""
    ),
    "measure": _entries("长, 短, 慢, 快, 暗, 亮, 小, 大, 热, 甜, 厚, 重"),
    "okay": _entries("一般, 普通, 寻常, 中等, 凑合, 平常"),
    "aspect": _entries(
        """演技, 剧情, 音乐, 剧本, 结局, 故事, 对白, 摄影, 节奏, 房间, 服务, 早餐, 厨房, 菜单, 甜点
        屏幕, 电池, 键盘, 相机, 设计, 封面, 翻译, 文笔, 章节, 装订, 花园, 泳池, 大堂, 景色, 面包, 咖啡, 音箱"""
    ),
    "very": _entries("很, 非常, 十分, 特别, 相当, 真的, 实在"),
    "not": _entries("不, 并不, 毫不"),
    "thing": _entries("电影, 小说, 酒店, 手机, 餐厅, 电脑, 话剧, 专辑, 相册, 剧集"),
    "person": _entries("姐姐, 哥哥, 邻居, 叔叔, 老师, 朋友, 同事, 表妹, 太太, 丈夫, 儿子"),
    "trait": _entries("耳朵, 眼睛, 肩膀, 右手, 膝盖"),
    "place": _entries("北京, 上海, 伦敦, 巴黎, 城里, 村里, 车站, 机场, 罗马, 港口"),
    "day": _entries("星期一, 星期二, 星期五, 周日, 生日, 假期, 第一天, 新年"),
    "number": _entries("两, 三, 四, 五, 六, 十, 十二, 二十, 九十"),
    "own": _entries("我, 我们, 咱们"),
    "own_object": _entries("我, 我们, 咱们"),
    "others": _entries("影评人, 记者, 游客, 学生, 邻居, 专家, 评委, 影迷, 老师, 编辑"),
}

CHINESE = Grammar(
    entries=_CHINESE_ENTRIES,
    plain=_patterns(
        """{aspect} *{opinion}
        {aspect} {very} *{opinion}
        我 觉得 {aspect} *{opinion}
        我们 觉得 {aspect} {very} *{opinion}
        {aspect} 看来 {very} *{opinion}
        {aspect} 显得 *{opinion}"""
    ),
    turned=_patterns(
        """{aspect} *{not} *{opinion}
        {aspect} 一点 也 *不 *{opinion}
        我 *不 觉得 {aspect} *{opinion}
        {aspect} *没有 那么 *{opinion}
        *没人 会 说 {aspect} *{opinion}
        {aspect} *谈不上 *{opinion}"""
    ),
    excess=_patterns("{aspect} *太 *{measure} 了\n{aspect} 实在 *太 *{measure}"),
    enough=_patterns("{aspect} *够 *{measure}\n{aspect} 刚好 *够 *{measure}"),
    neutral=_patterns(
        """{aspect} *{okay}
        {aspect} {very} *{okay}
        我 觉得 {aspect} *{okay}
        {aspect} *既不 *{positive} *也不 *{negative}"""
    ),
    together=_patterns("{first} ， {second}\n{first} ， 而且 {second}"),
    contrast=_patterns(
        """{side} ， 但 {main}
        {side} ， 可是 {main}
        {side} ， 不过 {main}
        虽然 {side} ， 但是 {main}
        虽然 {side} ， {main}
        {main} ， 尽管 {side}
        {main} ， 虽然 {side}"""
    ),
    fillers=_patterns(
        """我 在 {place} 买 的
        我们 {day} 看 的
        还 送 了 一本 {thing}
        我 的 {person} 坐 在 旁边
        {thing} 讲 的 是 {place} 的 一位 {person}
        这 是 {place} 做 的
        一共 有 {number} 章
        {thing} 有 {number} 部分
        花 了 {number} 天
        {person} {day} 订 的
        一张 票 {number} 块 钱"""
    ),
    distractors=_patterns(
        """一位 {any} 的 {person} 借 给 我 的
        讲 的 是 {place} 一位 {any} 的 {person}
        主角 的 {trait} {any} 过
        我 太太 {day} 也 来 了
        我们 不 是 在 {place} 看 的
        这 不 是 {place} 做 的
        我 {day} 没有 去 {place}
        不久 前 我 去 过 {place}
        {place} 的 水 够 用
        {any} {thing} 是 一家 酒吧 的 名字
        去 的 路 {very} {measure}
        我们 去 过 ， 但 不 是 {day}"""
    ),
    held=_patterns(
        """*{holder} 觉得 {aspect} {any}
        *{holder} 认为 {aspect} {very} {any}
        在 *{object} 看来 {aspect} {any}
        对 *{object} 来说 {aspect} {very} {any}"""
    ),
    facts=_patterns(
        """{holder} 在 {place} 看 过
        {holder} {day} 到 了 {place}
        {holder} 有 {number} 本
        {day} 寄 给 了 {object}
        对 {object} 一张 票 {number} 块 钱"""
    ),
    stop="。",
)

GRAMMARS: Mapping[str, Grammar] = {"en": ENGLISH, "zh": CHINESE}
