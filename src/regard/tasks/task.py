"""The task protocol: a frozen record of functions and data, with which shared code trains, evaluates and predicts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from numpy.typing import ArrayLike
from torch import Tensor, nn

from regard.look.trace import Trace
from regard.tasks.config import Needs, TaskConfig


class SettingError(ValueError):
    """A setting that does not exist or cannot have that value."""


class InputError(ValueError):
    """An input that a predictor cannot process; other inputs are not affected."""


@dataclass(frozen=True)
class Preset:
    """A named configuration: its purpose, its duration on two CPU cores, and the function that returns it."""

    about: str
    make: Callable[[], TaskConfig]
    time: str = ""


@dataclass(frozen=True)
class Figure:
    """A number of a result: its key in `result.json`, its displayed name, its unit and direction."""

    name: str
    label: str
    percent: bool = False
    better: Literal["higher", "lower"] = "higher"


@dataclass(frozen=True)
class Input:
    """A part of a predictor's input: its key in JSON records, its kind, and its displayed name."""

    name: str
    kind: Literal["text", "image", "sound", "scene"]
    label: str
    from_file: bool = False  # whether the command line also accepts the path of a text file


@dataclass(frozen=True)
class View:
    """The title of a page of attention, the name of a key, such as a source word, and the name of its maps.

    `parts` is the heading of the list of answers in a page, in English ("en") and Chinese ("zh").
    """

    title: str
    unit: str
    parts: Mapping[str, str] = field(default_factory=lambda: {"en": "Answers", "zh": "回答"})


@runtime_checkable
class Codec(Protocol):
    """Converts inputs to numbers and numbers to answers; it is saved with the run."""

    def save(self, directory: Path) -> None:
        """Write its files, named `tokenizer*.json` or `codec*.json`, into a run directory."""


@runtime_checkable
class Prediction(Protocol):
    """The answer of a predictor to one input."""

    @property
    def answer(self) -> str:
        """Return the answer as text."""

    @property
    def line(self) -> str:
        """Return the answer as one line of output, with its most important details."""

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON: the answer, its probability or score, the weights with their labels."""

    def trace(self) -> Trace | None:
        """Return the weights with labels; None if the model has no attention."""


@runtime_checkable
class Predictor(Protocol):
    """A trained model with its codec. `inputs` are mappings by the names of the task's `inputs`."""

    @property
    def network(self) -> nn.Module:
        """Return the network, whose self-attention is displayed beside the task's own maps."""

    def answers(self, inputs: Sequence[Mapping[str, Any]], **options: Any) -> list[Prediction | InputError]:
        """Return one answer for each input, in order; an error for an input that cannot be answered."""


@dataclass(frozen=True, eq=False)
class Material:
    """The data of a run: training records, validation and test examples."""

    codec: Any
    records: Sequence[Any]  # records that are collated into batches
    lengths: Sequence[ArrayLike]  # lengths of the records, a list for each padded side
    valid: Sequence[Any]  # examples: inputs with their gold answers
    test: Sequence[Any]
    longer: Sequence[Any]  # examples that are longer than any in training
    about: str
    # An example input: text, a list, or a mapping by the names of the inputs. An image is pixels
    # (3, height, width) or the bytes of a PNG file, a sound the bytes of a WAV file; they become files of the run.
    example: Any = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a network on a batch: its loss, and the inputs of penalties and estimators.

    `weights` are (…, q, k), `mask` selects those that count; `log_prob` and `reward`, (n,) or (b, t), are for hard
    attention: the log-probability of the sample, and the reward of the resulting answer; `choices` selects those that
    count (None: all), and `kinds` gives the kind of each if every kind has its own baseline.
    """

    total: Tensor
    count: int | Tensor
    weights: Sequence[Tensor] = ()
    mask: Tensor | None = None
    log_prob: Tensor | None = None
    reward: Tensor | None = None
    choices: Tensor | None = None
    kinds: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Judged:
    """Figures of some examples. Lists and texts are stored in `result.json` beside them."""

    metrics: dict[str, Any]
    attention: dict[str, Any] = field(default_factory=dict)
    faithfulness: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One use of attention.

    - `material(config, cache, codec, say)`: the built-in world, or the files of `config.data.files`, indexed in the
      folder `cache`. A resumed run passes its own `codec`; `say` reports progress.
    - `files(config)`: every file that the run uses.
    - `codec(directory, config)`: the codec of a run, from its `codec_files`.
    - `network(config, codec)`: the model, untrained.
    - `encode(codec, example, config)`: an example as a record; `sizes(record)`: its padded lengths.
    - `collate(records, config, grid=, rows=)`: records as a batch with `.to(device)`.
    - `outcome(network, batch, config, attention)`: the loss of a batch; with `attention`, also weights and choices.
    - `predictor(network, codec, config)`: answers to inputs by this network.
    - `loaded(network, codec, config, device, **options)`: the same for a network that is trained: by default it is
      moved to the device. `loading` names the options.
    - `validate(predictor, examples, config)`: a few fast figures by name.
    - `judge(predictor, examples, config, explain)`: all figures; with `explain`, faithfulness too.
    - `examples(paths, config, codec)`: the examples of other files.
    """

    name: str
    title: str  # title of the model card
    about: str
    data: str
    world: str
    config: type[TaskConfig]
    presets: Mapping[str, Preset]
    inputs: tuple[Input, ...]
    figures: tuple[Figure, ...]
    view: View
    material: Callable[..., Material]
    files: Callable[[Any], list[Path]]
    codec: Callable[[Path, Any], Any]
    codec_files: tuple[str, ...]
    network: Callable[[Any, Any], nn.Module]
    encode: Callable[[Any, Any, Any], Any]
    sizes: Callable[[Any], tuple[int, ...]]
    collate: Callable[..., Any]
    outcome: Callable[[Any, Any, Any, bool], Outcome]
    predictor: Callable[[Any, Any, Any], Any]
    validate: Callable[[Any, Sequence[Any], Any], dict[str, float]]
    judge: Callable[[Any, Sequence[Any], Any, bool], Judged]
    examples: Callable[[Sequence[Path], Any, Any], tuple[list[Any], str]]
    asked: Callable[[Any], Mapping[str, Any]]  # returns the input of an example
    loaded: Callable[..., Any] | None = None
    loading: tuple[str, ...] = ()
    live: Callable[[str, Any], Any] | None = None  # live(name, predictor) returns further functions for the studio
    options: tuple[str, ...] = ()  # names of the options of `answers`
    aliases: Mapping[str, str] = field(default_factory=dict)  # short names of settings
    choosing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # preset selected by a value of a setting
    needs: Needs = field(default_factory=dict)  # conditions under which settings have an effect
    recorded: tuple[str, ...] = ()  # settings that config.json always contains, even without effect
    changeable: tuple[str, ...] = ()  # settings that may change when a run is resumed, besides those of every task
    validated: int = 200  # number of examples that `validate` gets

    def figure(self, name: str) -> Figure | None:
        """Return the `Figure` of a key of a result; None if the key is not a figure."""
        return next((one for one in self.figures if one.name == name), None)
