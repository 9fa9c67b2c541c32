"""The sounds (phones) of the synthetic speech, and a lexicon of words spelled as sounds."""

from typing import NamedTuple


class Phone(NamedTuple):
    """A speech sound: three formants in Hz, the amplitudes of voice and noise, the noise's centre and width in Hz.

    `seconds` is the typical duration of the sound, which varies with the speaker.
    """

    f1: int
    f2: int
    f3: int
    voice: float
    noise: float
    centre: int
    width: int
    seconds: float

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Return the values of all fields except the duration."""
        return self[:7]


def _vowel(f1: int, f2: int, f3: int, seconds: float = 0.1) -> Phone:
    return Phone(f1, f2, f3, 1.0, 0.0, 2000, 1000, seconds)


def _fricative(centre: int, width: int, noise: float, *, voice: float = 0.0, seconds: float = 0.09) -> Phone:
    return Phone(400, 1600, 2600, voice, noise, centre, width, seconds)


def _burst(centre: int, width: int, noise: float = 0.9) -> Phone:
    return Phone(400, 1500, 2500, 0.0, noise, centre, width, 0.03)


# The formants of the vowels are those of men in Peterson & Barney (1952); those of other sounds are rounded textbook
# values. "-" is silence; "closed" is the closure before the burst of a plosive.
PHONES = {
    "-": Phone(500, 1500, 2500, 0.0, 0.0, 2000, 1000, 0.05),
    "iy": _vowel(270, 2290, 3010),
    "ih": _vowel(390, 1990, 2550, 0.08),
    "eh": _vowel(530, 1840, 2480),
    "ae": _vowel(660, 1720, 2410),
    "ah": _vowel(640, 1190, 2390, 0.09),
    "aa": _vowel(730, 1090, 2440),
    "ao": _vowel(570, 840, 2410, 0.11),
    "uh": _vowel(440, 1020, 2240),
    "uw": _vowel(300, 870, 2240),
    "w": Phone(300, 610, 2200, 0.7, 0.0, 2000, 1000, 0.06),
    "y": Phone(260, 2200, 3000, 0.7, 0.0, 2000, 1000, 0.06),
    "r": Phone(310, 1060, 1380, 0.7, 0.0, 2000, 1000, 0.07),
    "l": Phone(360, 1300, 2700, 0.7, 0.0, 2000, 1000, 0.07),
    "m": Phone(250, 1000, 2200, 0.45, 0.0, 2000, 1000, 0.08),
    "n": Phone(250, 1500, 2500, 0.45, 0.0, 2000, 1000, 0.08),
    "s": _fricative(3700, 500, 0.8),
    "z": _fricative(3700, 500, 0.5, voice=0.3),
    "f": _fricative(2200, 1800, 0.35),
    "v": _fricative(2000, 1600, 0.2, voice=0.4, seconds=0.07),
    "th": _fricative(2900, 1200, 0.25),
    "t": _burst(3300, 900),
    "k": _burst(1900, 500),
    "p": _burst(800, 600),
    "d": _burst(3000, 900, 0.6),
    "g": _burst(1700, 500, 0.6),
    "closed": Phone(300, 1500, 2500, 0.02, 0.0, 2000, 1000, 0.04),
}

# A word as groups of letters, each with the names of its sounds; a group without sounds is silent.
Spelling = tuple[tuple[str, tuple[str, ...]], ...]


def _spelled(text: str) -> Spelling:
    """Return the spelling that a text such as "t=t wo=uw" describes: groups of letters, each with its sounds.

    A closure (a short silence) is inserted before the burst of each plosive (t, k, p, d, g).

    >>> _spelled("t=t wo=uw")
    (('t', ('closed', 't')), ('wo', ('uw',)))
    """
    groups = []
    for part in text.split():
        letters, _, names = part.partition("=")
        sounds = [name for name in names.split("+") if name]
        closed = [sound for name in sounds for sound in (("closed", name) if name in "tkpdg" else (name,))]
        groups.append((letters, tuple(closed)))
    return tuple(groups)


LEXICON = {
    "zero": _spelled("z=z e=iy r=r o=ao+uw"),
    "one": _spelled("o=w+ah n=n e="),
    "two": _spelled("t=t wo=uw"),
    "three": _spelled("th=th r=r ee=iy"),
    "four": _spelled("f=f ou=ao r=r"),
    "five": _spelled("f=f i=aa+iy v=v e="),
    "six": _spelled("s=s i=ih x=k+s"),
    "seven": _spelled("s=s e=eh v=v e=ah n=n"),
    "eight": _spelled("eigh=eh+iy t=t"),
    "nine": _spelled("n=n i=aa+iy n=n e="),
    "yes": _spelled("y=y e=eh s=s"),
    "no": _spelled("n=n o=ao+uw"),
    "go": _spelled("g=g o=ao+uw"),
    "stop": _spelled("s=s t=t o=aa p=p"),
    "left": _spelled("l=l e=eh f=f t=t"),
    "right": _spelled("r=r igh=aa+iy t=t"),
    "up": _spelled("u=ah p=p"),
    "down": _spelled("d=d ow=aa+uw n=n"),
}
