"""The codec of glimpse models: it holds the names of the classes and the size of the images."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "codec.json"


@dataclass(frozen=True)
class GlimpseCodec:
    """The names of the classes, and the height and width of the images."""

    classes: tuple[str, ...]
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    def save(self, directory: Path) -> None:
        (directory / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "GlimpseCodec":
        facts = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return cls(tuple(map(str, facts["classes"])), int(facts["height"]), int(facts["width"]))
