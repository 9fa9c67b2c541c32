"""Translation as a task of the command line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.tasks.settings import changed
from regard.tasks.task import SettingError, Task
from regard.tasks.translation.config import NEEDS, TranslationConfig
from regard.tasks.translation.material import Example, examples_of
from regard.tasks.translation.presets import PRESETS
from regard.tasks.translation.training import evaluated, make_material, train
from regard.tasks.translation.translator import Translator
from regard.train.run import Run

_ALIASES = {"model": "model.kind", "data": "data.files"}


def configure(preset: str, data: Sequence[Path], settings: Mapping[str, str]) -> TranslationConfig:
    """A preset with the data and the settings asked for."""
    if preset not in PRESETS:
        raise SettingError(f"no preset is called {preset!r}: there are {', '.join(PRESETS)}")
    made = PRESETS[preset].make()
    assert isinstance(made, TranslationConfig)
    if data:
        missing = [str(path) for path in data if not path.exists()]
        if missing:
            raise SettingError(f"no such file: {', '.join(missing)}")
        made = made.model_copy(update={"data": made.data.model_copy(update={"files": tuple(data)})})
    return changed(made, settings, aliases=_ALIASES, needs=NEEDS)


def evaluate(run: Run, data: Sequence[Path]) -> dict[str, Any]:
    """The result record of a run, for its own test part or for other data."""
    config = run.config_as(TranslationConfig)
    translator = Translator.load(run)
    longer: list[Example] = []
    if data:
        examples, about = examples_of(data, config.data), ", ".join(map(str, data))
    else:
        material = make_material(config, run)
        examples, longer, about = material.test, material.longer, material.about
    run.manifest.check("result.json")
    known = run.result() if (run.path / "result.json").is_file() else {}
    kept = {name: known[name] for name in ("seconds", "parameters", "versions", "device", "seed") if name in known}
    return {"task": config.task, "data": about, **evaluated(translator, config, examples, longer), **kept}


TRANSLATION = Task(
    name="translation",
    about="Machine translation, with the alignment of every word",
    data="two line-aligned files, one TSV or JSONL (each maybe .gz), or a folder; none: the built-in English-Chinese",
    presets=PRESETS,
    configure=configure,
    train=train,
    evaluate=evaluate,
    predictor=Translator.load,
)
