"""The lexicon of the generated sentences: English words with their forms, and the Chinese words that translate them.

Each line or entry of a table is one word. Every noun has a kind, such as "food" or "person". Verbs and adjectives
combine only with certain kinds: the object of "eat" is food, the subject of "think" is a person.
"""

from dataclasses import dataclass

from regard.data.worlds.grammar.inflection import with_ed, with_er, with_ing, with_s


@dataclass(frozen=True, slots=True)
class Noun:
    """A countable noun with its Chinese translation and measure word."""

    singular: str
    plural: str
    chinese: str
    measure: str
    kind: str


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective with its Chinese translation.

    In Chinese, a `close` adjective precedes the noun without 的. A `late` adjective occurs only after "is", never
    before a noun.
    """

    english: str
    comparative: str | None  # the comparative with "-er"; None if the comparative is formed with "more"
    chinese: str
    close: bool
    kinds: frozenset[str]
    colour: bool = False
    late: bool = False
    living: str | None = None  # the Chinese adjective for people and animals, if it differs from the one for things

    def word(self, kind: str) -> str:
        """Return the Chinese adjective for a noun of this kind; for example, an old man is 老, an old chair is 旧."""
        return self.living if self.living and kind in ("person", "kin", "animal") else self.chinese


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """A verb: its English forms, and its Chinese translation for each kind of object ("" for verbs without an object).

    `aspect` restricts the tenses: an *action* has every tense; an *event* has no duration ("found", not "is finding");
    a *state* has no progressive ("likes", not "is liking"); *saying* and *asking* are for verbs of speech.
    """

    base: str
    third: str
    past: str
    participle: str
    gerund: str
    chinese: dict[str, str]
    aspect: str
    subjects: tuple[str, ...]
    passive: bool = False


def _noun(kind: str, line: str) -> Noun:
    english, chinese, measure = line.split()
    singular, _, plural = english.partition("/")
    return Noun(singular, plural or with_s(singular), chinese, measure, kind)


def _nouns(**tables: str) -> dict[str, tuple[Noun, ...]]:
    return {
        kind: tuple(_noun(kind, line) for line in table.strip().replace("\n", ",").split(","))
        for kind, table in tables.items()
    }


NOUNS = _nouns(
    person="""man/men 男人 个, woman/women 女人 个, boy 男孩 个, girl 女孩 个, child/children 孩子 个, teacher 老师 位
        student 学生 个, doctor 医生 位, nurse 护士 位, farmer 农民 个, driver 司机 个, lawyer 律师 位, writer 作家 位
        singer 歌手 位, artist 艺术家 位, policeman/policemen 警察 个, soldier 士兵 个, engineer 工程师 位
        scientist 科学家 位, worker 工人 个, chef 厨师 位, neighbor 邻居 个, tourist 游客 个, waiter 服务员 个
        manager 经理 位""",
    kin="""mother 妈妈 个, father 爸爸 个, brother 哥哥 个, sister 姐姐 个, grandmother 奶奶 个, grandfather 爷爷 个
        uncle 叔叔 个, aunt 阿姨 个, son 儿子 个, daughter 女儿 个""",
    animal="""cat 猫 只, dog 狗 只, bird 鸟 只, horse 马 匹, cow 牛 头, pig 猪 头, rabbit 兔子 只, tiger 老虎 只
        monkey 猴子 只, elephant 大象 头, mouse/mice 老鼠 只, duck 鸭子 只, lion 狮子 头, panda 熊猫 只
        wolf/wolves 狼 只, fox 狐狸 只""",
    food="""apple 苹果 个, banana 香蕉 根, egg 鸡蛋 个, cake 蛋糕 块, pear 梨 个, peach 桃子 个, tomato 西红柿 个
        potato 土豆 个, dumpling 饺子 个, sandwich 三明治 个, cookie 饼干 块, carrot 胡萝卜 根""",
    text="""book 书 本, newspaper 报纸 份, letter 信 封, novel 小说 本, magazine 杂志 本, story 故事 个, poem 诗 首
        report 报告 份""",
    thing="""chair 椅子 把, table 桌子 张, box 箱子 个, cup 杯子 个, knife/knives 刀 把, key 钥匙 把, phone 手机 部
        computer 电脑 台, camera 照相机 台, umbrella 雨伞 把, pen 钢笔 支, pencil 铅笔 支, map 地图 张, bag 包 个
        ball 球 个, gift 礼物 份, ticket 票 张, stone 石头 块, flower 花 朵, mirror 镜子 面, toy 玩具 个, lamp 灯 盏""",
    vehicle="""car 汽车 辆, bus 公共汽车 辆, truck 卡车 辆, taxi/taxis 出租车 辆""",
    cycle="bike 自行车 辆, motorcycle 摩托车 辆",
    clothes="coat 外套 件, shirt 衬衫 件, dress 裙子 条, sweater 毛衣 件",
    headwear="hat 帽子 顶, scarf/scarves 围巾 条",
    opening="door 门 扇, window 窗户 扇",
    building="house 房子 座, bridge 桥 座",
    film="movie 电影 部",
    song="song 歌 首",
)

# Some verbs combine only with certain nouns of the kind "text": one writes somebody a letter, and tells a story.
NOUNS["letters"] = tuple(noun for noun in NOUNS["text"] if noun.singular in ("letter", "poem"))
NOUNS["stories"] = tuple(noun for noun in NOUNS["text"] if noun.singular == "story")

# Nouns of people that may have a possessive: "my teacher", but not "my tourist".
RELATED = frozenset(("teacher", "student", "doctor", "lawyer", "neighbor", "child", "driver", "manager"))

# Mass nouns, which are counted by their container (`HOLDERS`): "a cup of tea", 一 杯 茶.
MASS = {
    "drink": {"water": "水", "milk": "牛奶", "tea": "茶", "coffee": "咖啡", "juice": "果汁", "beer": "啤酒"},
    "dish": {"rice": "米饭", "soup": "汤", "noodles": "面条"},
}
HOLDERS = {
    "drink": (("cup", "cups", "杯"), ("bottle", "bottles", "瓶")),
    "dish": (("bowl", "bowls", "碗"), ("plate", "plates", "盘")),
}

# Nouns that always have the same article or never have one, and that cannot be counted, such as "football" and "the
# piano".
BARE = {
    "language": {"English": "英语", "Chinese": "中文", "French": "法语"},
    "subject": {"music": "音乐", "history": "历史", "mathematics": "数学"},
    "kicked": {"football": "足球"},
    "struck": {"basketball": "篮球", "tennis": "网球"},
    "instrument": {"the piano": "钢琴", "the guitar": "吉他"},
}

NAMES = {
    **{"Tom": "汤姆", "Jerry": "杰瑞", "Mary": "玛丽", "John": "约翰", "Anna": "安娜", "Peter": "彼得"},
    **{"Alice": "爱丽丝", "Bob": "鲍勃", "David": "大卫", "Emma": "艾玛", "Lucy": "露西", "Jack": "杰克"},
    **{"Mike": "迈克", "Linda": "琳达", "Paul": "保罗", "Lily": "莉莉", "Henry": "亨利", "Helen": "海伦"},
    **{"Li Ming": "李明", "Wang Fang": "王芳"},
}

# Each line is a pronoun: subject form, object form, possessive, Chinese, and the form of "be" that agrees with it.
PRONOUNS = (
    ("I", "me", "my", "我", "am"),
    ("you", "you", "your", "你", "are"),
    ("he", "him", "his", "他", "is"),
    ("she", "her", "her", "她", "is"),
    ("we", "us", "our", "我们", "are"),
    ("they", "them", "their", "他们", "are"),
)

NUMBERS = {
    **{"two": "两", "three": "三", "four": "四", "five": "五", "six": "六", "seven": "七", "eight": "八"},
    **{"nine": "九", "ten": "十"},
}

_ALIVE = "person kin animal"
_THINGS = "text thing vehicle cycle clothes headwear building"


def _adjective(line: str) -> Adjective:
    english, chinese, close, *kinds = line.split()
    word, _, living = chinese.partition("/")
    more = english.startswith("+")
    english = english.lstrip("+")
    return Adjective(
        english=english,
        comparative=None if more else with_er(english),
        chinese=word,
        close=close == "close",
        kinds=frozenset(kinds),
        late=close == "late",
        living=living or None,
    )


# Each line is an adjective: English, Chinese, how the adjective precedes a noun (close: without 的; de: with 的; late:
# never), and the kinds of nouns. "+" before the English word means that its comparative is formed with "more"; the
# Chinese word after a slash is for people and animals.
ADJECTIVES = tuple(
    _adjective(line)
    for line in f"""
    big 大 close animal food thing vehicle building
    small 小 close animal food thing vehicle building
    old 旧/老 close person animal {_THINGS}
    new 新 close {_THINGS} film song
    young 年轻 de person
    tall 高 late person
    thin 瘦 late {_ALIVE}
    happy 快乐 de {_ALIVE}
    clever 聪明 de {_ALIVE}
    lazy 懒惰 de {_ALIVE}
    kind 善良 de person kin
    brave 勇敢 de {_ALIVE}
    +famous 著名 de person film song
    rich 富有 de person
    +tired 疲惫 de {_ALIVE}
    strong 强壮 de {_ALIVE}
    +beautiful 美丽 de person clothes headwear building song
    cute 可爱 de animal
    +expensive 昂贵 de {_THINGS}
    cheap 便宜 de food thing vehicle cycle clothes headwear
    heavy 重 late thing
    clean 干净 de clothes headwear thing vehicle
    dirty 脏 close clothes headwear thing vehicle
    fresh 新鲜 de food
    sweet 甜 de food
    +delicious 美味 de food
    +interesting 有趣 de text film
    +boring 无聊 de text film
    long 长 late text film song
    simple 简单 de text song
    +important 重要 de text
    """.strip().splitlines()
) + tuple(
    Adjective(
        english, None, chinese, True, frozenset(("thing", "vehicle", "cycle", "clothes", "headwear")), colour=True
    )
    for english, chinese in {"red": "红色", "black": "黑色", "white": "白色", "blue": "蓝色", "green": "绿色"}.items()
)


def _verb(line: str) -> Verb:
    forms, chinese, aspect, subjects = line.split()
    base, past, participle = (*forms.split("/"), "", "")[:3]
    past = past or with_ed(base)
    return Verb(
        base=base,
        third="has" if base == "have" else with_s(base),
        past=past,
        participle=participle or past,
        gerund=with_ing(base),
        chinese=dict(_words(chinese)),
        aspect=aspect.rstrip("*"),
        subjects=tuple(subjects.split("+")),
        passive=aspect.endswith("*"),
    )


def _words(chinese: str) -> list[tuple[str, str]]:
    """Return the pairs (kind of object, Chinese verb) of a table entry; the kind is "" for a verb without object.

    `吃:food+dish,喝:drink` gives (food, 吃), (dish, 吃), (drink, 喝).
    """
    pairs: list[tuple[str, str]] = []
    for part in chinese.split(","):
        word, _, kinds = part.partition(":")
        pairs += [(kind, word) for kind in kinds.split("+")]
    return pairs


# Each line is a verb: base/past/participle (regular forms are left out), Chinese with the kinds of objects, aspect,
# kinds of subjects. A star after the aspect marks a verb whose passive sounds natural.
TRANSITIVE = tuple(
    _verb(line)
    for line in """
    chase 追逐:person+animal action* person+animal
    bite/bit/bitten 咬:person+animal action* animal
    see/saw/seen 看见:person+animal+thing+vehicle event* person+animal
    find/found 找到:person+animal+thing+text+vehicle event* person+animal
    catch/caught 抓住:animal event* person+animal
    meet/met 遇见:person+animal event person
    lose/lost 弄丢:thing+text+headwear event person
    break/broke/broken 弄坏:thing+opening+vehicle event* person
    like 喜欢:person+animal+food+drink+text+film+song+clothes+subject state person+animal
    love 爱:person+subject state person
    hate 讨厌:person+animal+drink+subject state person
    know/knew/known 认识:person state person
    need 需要:person+thing+text+vehicle+drink state person
    miss 想念:person state person
    trust 信任:person state person+animal
    help 帮助:person+animal action* person
    visit 拜访:person action person
    thank 感谢:person action person
    invite 邀请:person action* person
    follow 跟踪:person+animal action person+animal
    hug 拥抱:person+animal action person
    watch 看:film,观察:animal action person
    feed/fed 喂:animal action person
    wash 洗:food+clothes+vehicle action person
    clean 打扫:building action person
    cook 煮:dish action person
    eat/ate/eaten 吃:food+dish action* person+animal
    drink/drank/drunk 喝:drink action* person+animal
    buy/bought 买:food+drink+text+thing+vehicle+cycle+clothes+headwear action person
    sell/sold 卖:food+drink+text+thing+vehicle+cycle+clothes+headwear action person
    read/read 读:text action person
    write/wrote/written 写:text+song action person
    carry 搬:thing action person
    use 使用:thing action person
    repair 修理:vehicle+cycle+building action* person
    open 打开:opening+text action* person
    close 关上:opening event* person
    drive/drove/driven 开:vehicle action person
    ride/rode/ridden 骑:cycle action person
    wear/wore/worn 穿:clothes,戴:headwear action person
    play 踢:kicked,打:struck,弹:instrument action person
    study 学习:language+subject action person
    teach/taught 教:language+subject action person
    speak/spoke/spoken 说:language action person
    build/built 建造:building action person
    steal/stole/stolen 偷:thing+text+vehicle+cycle event* person
    draw/drew/drawn 画:person+animal+building action person
    push 推:vehicle+cycle action person
    sing/sang/sung 唱:song action person
    """.strip().splitlines()
)

INTRANSITIVE = tuple(
    _verb(line)
    for line in """
    sleep/slept 睡觉 action person+animal
    run/ran/run 跑步 action person
    swim/swam/swum 游泳 action person+animal
    laugh 笑 action person
    cry 哭 action person
    dance 跳舞 action person
    work 工作 action person
    rest 休息 action person+animal
    wait 等待 action person
    smile 微笑 action person
    walk 散步 action person
    play 玩 action person+animal
    shout 大喊 action person
    exercise 锻炼 action person
    """.strip().splitlines()
)
# Verbs that a duration can follow directly in Chinese (工作 了 两 个 小时, "worked for two hours"), because their
# Chinese word is not a compound of a verb and its object.
LASTING = ("work", "rest", "wait", "cry", "laugh", "exercise", "play")

GIVING = tuple(
    _verb(line)
    for line in """
    give/gave/given 给:text+thing+food action person
    lend/lent 借给:text+thing+cycle action person
    """.strip().splitlines()
)
SENDING = tuple(
    _verb(line)
    for line in """
    send/sent 寄:text+thing action person
    write/wrote/written 写:letters action person
    tell/told 讲:stories action person
    """.strip().splitlines()
)
PUTTING = tuple(
    _verb(line)
    for line in """
    put/put 放:text+thing+food action person
    hide/hid/hidden 藏:text+thing action person
    """.strip().splitlines()
)
STAYING = tuple(
    _verb(line)
    for line in """
    sit/sat 坐 action person+animal
    stand/stood 站 action person
    lie/lay/lain 躺 action person+animal
    """.strip().splitlines()
)
GOING = tuple(
    _verb(line)
    for line in """
    go/went/gone 去 action person
    come/came/come 来 action person
    return 回到 event person
    """.strip().splitlines()
)
LIVING = _verb("live 住 state person")
HAVING = _verb("have/had 有 state person")
SAYING = tuple(
    _verb(line)
    for line in """
    say/said 说 saying person
    think/thought 认为 saying person
    know/knew/known 知道 saying person
    believe 相信 saying person
    hope 希望 saying person
    """.strip().splitlines()
)
ASKING = tuple(
    _verb(line)
    for line in """
    ask 请 asking person
    want 希望 asking person
    order 命令 asking person
    """.strip().splitlines()
)
