"""Adverbials of place, time and manner in English and Chinese.

In English, adverbials of place, time and manner follow the verb; in Chinese, they precede it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from regard.data.worlds.grammar.lexicon import NUMBERS
from regard.data.worlds.random_choices import Dice, Made, Token, tokens


class Place(NamedTuple):
    """A place such as "in the park", 公园 里.

    The fields are the English preposition, the English noun with its article, the Chinese noun, and the Chinese word
    after that noun (里), or "" if there is none.
    """

    preposition: str
    english: str
    chinese: str
    side: str = ""


class Setting(NamedTuple):
    """An adverbial in English and Chinese."""

    english: list[Token]
    chinese: list[Made]


def _places(table: str) -> tuple[Place, ...]:
    rows = (line.split("|") for line in table.strip().replace("\n", ",").split(","))
    return tuple(Place(*(cell.strip() for cell in row)) for row in rows)


# Places where people and animals act, one per entry: English preposition | noun | Chinese noun | word after the noun.
SCENES = _places(
    """in|the park|公园|里, in|the garden|花园|里, in|the kitchen|厨房|里, in|the classroom|教室|里
    in|the library|图书馆|里, in|the restaurant|餐馆|里, in|the shop|商店|里, in|the hospital|医院|里
    at|the station|车站|, at|school|学校|, at|home|家|里, on|the street|街|上, on|the beach|海滩|上
    in|the office|办公室|里, in|the hotel|酒店|里, in|the museum|博物馆|里, at|the airport|机场|
    in|the forest|森林|里, in|the village|村子|里, in|Beijing|北京|, in|Shanghai|上海|, in|London|伦敦|
    in|Paris|巴黎|, under|the tree|树|下, by|the river|河|边, behind|the school|学校|后面
    in front of|the library|图书馆|前面, next to|the bridge|桥|旁边, near|the station|车站|附近"""
)
# Places where things lie, in the format: English preposition | noun | Chinese noun | word after the noun.
SURFACES = _places(
    """on|the table|桌子|上, under|the table|桌子|下面, on|the chair|椅子|上, under|the chair|椅子|下面
    on|the bed|床|上, under|the bed|床|下面, on|the sofa|沙发|上, in|the box|箱子|里, in|the bag|包|里
    on|the desk|书桌|上, on|the floor|地板|上, next to|the window|窗户|旁边, behind|the door|门|后面"""
)
SEATS = _places(
    "on|the chair|椅子|上, on|the bed|床|上, on|the sofa|沙发|上, under|the tree|树|下, on|the floor|地板|上"
)
CITIES = tuple(place for place in SCENES if place.english[0].isupper())
# Destinations of verbs of motion, such as "go".
GOALS = tuple(place for place in SCENES if place.preposition in ("in", "at") and place.english != "home")

_DAYS = {
    **{"Monday": "一", "Tuesday": "二", "Wednesday": "三", "Thursday": "四", "Friday": "五"},
    **{"Saturday": "六", "Sunday": "日"},
}
_WEEK = {f"on {day}": f"星期{chinese}:1" for day, chinese in _DAYS.items()}
# Each English time with its Chinese words. The digits after a Chinese word are the indices of the English words that it
# translates: in "上周:01", 上周 translates both words of "last week".
PAST = {
    **{"yesterday": "昨天:0", "last night": "昨晚:01", "last week": "上周:01", "last year": "去年:01"},
    **{"this morning": "今天:0 早上:1", "this afternoon": "今天:0 下午:1"},
    **_WEEK,
}
FUTURE = {
    **{"tomorrow": "明天:0", "next week": "下周:01", "next year": "明年:01", "tonight": "今晚:0"},
    **{"tomorrow morning": "明天:0 早上:1", "this afternoon": "今天:0 下午:1", "soon": "很快:0"},
    **_WEEK,
}
HABITUAL = {
    **{"every day": "每天:01", "every morning": "每天:0 早上:1", "every week": "每周:01"},
    **{"in the morning": "早上:2", "at night": "晚上:1", "in the summer": "夏天:2", "in the winter": "冬天:2"},
}
NOW = {"now": "现在:0", "today": "今天:0"}
TIMES = {"past": PAST, "future": FUTURE, "habitual": HABITUAL, "now": NOW}

MANNERS = {
    **{"slowly": "慢慢", "quietly": "静静", "happily": "高兴", "carefully": "小心", "quickly": "飞快"},
    **{"silently": "默默", "seriously": "认真"},
}
RIDES = {
    "by bus": "坐 公共汽车",
    "by train": "坐 火车",
    "by plane": "坐 飞机",
    "by bike": "骑 自行车",
    "by car": "开 汽车",
}
FREQUENCIES = {"always": "总是", "often": "经常", "sometimes": "有时", "usually": "通常"}


def place(dice: Dice, places: Sequence[Place], *, at: bool = True) -> Setting:
    """Return one of the given places in English and Chinese, such as "in the park", 在 公园 里.

    With `at=False` the Chinese preposition 在 is omitted (公园 里), for patterns in which Chinese does not use it.
    """
    chosen = dice.fresh(places)
    preposition, noun = tokens(chosen.preposition), tokens(chosen.english)
    # In 在 … 上 the word 上 translates "on". Where no word follows the noun, 在 translates the preposition.
    sure = () if chosen.side else tuple(preposition)
    chinese = [Made("在", sure, (*preposition, *noun))] if at else []
    chinese.append(Made(chosen.chinese, (noun[-1],), tuple(noun[:-1])))
    if chosen.side:
        chinese.append(Made(chosen.side, tuple(preposition), tuple(noun)))
    return Setting(preposition + noun, chinese)


def goal(dice: Dice) -> Setting:
    """Return a destination in both languages, such as "to the park", 公园."""
    chosen = dice.fresh(GOALS)
    to, noun = Token("to"), tokens(chosen.english)
    return Setting([to, *noun], [Made(chosen.chinese, (noun[-1],), (to, *noun[:-1]))])


def time(dice: Dice, sort: str) -> Setting:
    """Return a time in both languages, such as "yesterday", 昨天, or "three days ago", 三 天 前.

    `sort` is a key of `TIMES`, such as "past": the kind of time.
    """
    if sort == "past" and dice.chance(0.12):
        number = dice.pick(tuple(NUMBERS))
        unit, chinese, measure = dice.pick((("days", "天", ""), ("years", "年", ""), ("weeks", "周", ""), _MONTHS))
        count, units, ago = Token(number), Token(unit), Token("ago")
        counted = [Made(measure, (), (count, units))] if measure else []
        words = [Made(NUMBERS[number], (count,)), *counted, Made(chinese, (units,)), Made("前", (ago,))]
        return Setting([count, units, ago], words)
    table = TIMES[sort]
    english = dice.pick(tuple(table))
    source_words = tokens(english)
    words = []
    linked: set[int] = set()
    for part in table[english].split():
        chinese, _, sources = part.partition(":")
        linked |= {int(source) for source in sources}
        words.append(Made(chinese, tuple(source_words[int(source)] for source in sources)))
    rest = tuple(token for index, token in enumerate(source_words) if index not in linked)
    return Setting(source_words, [words[0]._replace(possible=rest), *words[1:]])


def manner(dice: Dice) -> Setting:
    """Return an adverb of manner in both languages, such as "slowly", 慢慢 地."""
    english = dice.pick(tuple(MANNERS))
    token = Token(english)
    return Setting([token], [Made(MANNERS[english], (token,)), Made("地", (), (token,))])


def ride(dice: Dice) -> Setting:
    """Return a means of transport in both languages, such as "by bus", 坐 公共汽车."""
    english = dice.pick(tuple(RIDES))
    by, vehicle = tokens(english)
    verb, noun = RIDES[english].split()
    return Setting([by, vehicle], [Made(verb, (by,)), Made(noun, (vehicle,))])


def span(dice: Dice) -> Setting:
    """Return a duration in both languages, such as "for two hours", 两 个 小时.

    In Chinese, unlike other adverbials, a duration follows the verb.
    """
    number = dice.pick(tuple(NUMBERS))
    unit, chinese, measure = dice.pick((("hours", "小时", "个"), ("minutes", "分钟", "")))
    preposition, count, units = Token("for"), Token(number), Token(unit)
    counted = [Made(measure, (), (count, units))] if measure else []
    words = [Made(NUMBERS[number], (count,), (preposition,)), *counted, Made(chinese, (units,))]
    return Setting([preposition, count, units], words)


_MONTHS = ("months", "月", "个")
