"""The protocol of a task: a frozen record of functions, with which shared code trains, evaluates and predicts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from numpy.typing import ArrayLike
from torch import Tensor, nn

from regard.look.trace import Trace
from regard.tasks.config import Needs, TaskConfig


class SettingError(ValueError):
    """Raised for invalid settings: an unknown setting or one without effect, a bad value, missing files."""


class InputError(ValueError):
    """Raised or returned for an input that a predictor cannot process; other inputs of the call are processed."""


@dataclass(frozen=True)
class Preset:
    """A named configuration: its purpose, the function that returns it, and its training time.

    `time` is measured on two CPU cores, unless it mentions a GPU.
    """

    about: str
    make: Callable[[], TaskConfig]
    time: str = ""


@dataclass(frozen=True)
class Figure:
    """A metric in `result.json`: key, displayed name, whether it is shown in percent, and which values are better."""

    name: str
    label: str
    percent: bool = False
    better: Literal["higher", "lower"] = "higher"


@dataclass(frozen=True)
class Input:
    """One part of a predictor's input, such as the question: its key in JSON records, its kind, its displayed name."""

    name: str
    kind: Literal["text", "image", "sound", "scene"]
    label: str
    from_file: bool = False  # whether the command line also accepts the path of a text file


@dataclass(frozen=True)
class View:
    """The wording of an attention page (HTML): its title, and `unit`, the name of one key, such as "source word".

    `parts` is the heading of the list of answers in the page, in English ("en") and Chinese ("zh").
    """

    title: str
    unit: str
    parts: Mapping[str, str] = field(default_factory=lambda: {"en": "Answers", "zh": "回答"})


@runtime_checkable
class Codec(Protocol):
    """Converts inputs to numbers for the network and the network's output to answers; stored in each run directory."""

    def save(self, directory: Path) -> None:
        """Write the codec's files, named `tokenizer*.json` or `codec*.json`, into a run directory."""


@runtime_checkable
class Prediction(Protocol):
    """The answer of a predictor to one input."""

    @property
    def answer(self) -> str:
        """Return the answer as text."""

    @property
    def line(self) -> str:
        """Return the answer and its most important details as one line of text."""

    def record(self) -> dict[str, Any]:
        """Return a JSON object: the answer, its probability or score, and the attention weights with their labels."""

    def trace(self) -> Trace | None:
        """Return the attention weights with labels for queries and keys; None if the model has no attention."""


@runtime_checkable
class Predictor(Protocol):
    """A trained model with its codec, which computes a prediction for each input of its task."""

    @property
    def network(self) -> nn.Module:
        """Return the network; pages show its self-attention in addition to the attention maps of the prediction."""

    def answers(self, inputs: Sequence[Mapping[str, Any]], **options: Any) -> list[Prediction | InputError]:
        """Return one prediction for each input, in order; if it cannot be computed, an `InputError` instead.

        Each input is a mapping whose keys are the names in `Task.inputs`.
        """


@dataclass(frozen=True, eq=False)
class Material:
    """The data of a run: encoded training records, and validation and test examples (inputs with gold answers)."""

    codec: Any
    records: Sequence[Any]  # encoded training examples, which are collated into batches
    # one array for each padded field of the records, such as source and target: the length of this field in each record
    lengths: Sequence[ArrayLike]
    valid: Sequence[Any]  # validation examples: inputs with their gold answers
    test: Sequence[Any]
    longer: Sequence[Any]  # test examples that are longer than any training example
    about: str
    # An example input for users to try: text, a list, or a mapping by the names of the inputs. An image is given as
    # pixels (3, height, width) or as the bytes of a PNG file, a sound as the bytes of a WAV file; images and sounds are
    # written to files in the run directory.
    example: Any = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a network on a batch: the summed loss `total`, and the inputs of attention penalties and REINFORCE.

    `count` is the number of terms that `total` sums. `weights` are the attention weights (…, queries, keys), and `mask`
    selects the weights that a penalty uses. With hard attention, `log_prob` holds the log-probability of each sampled
    choice of a key, and `reward` the reward of the resulting answer; both have one entry for each example, (n,), or for
    each token of a batch of texts, (b, t). `choices` selects the samples that enter the REINFORCE loss (None: all).
    `kinds` holds an integer for each sample, such as the number of the target word, if REINFORCE has a separate
    baseline for each of these integers.
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
    """Metrics of a predictor on some examples, as `result.json` stores them; values may also be lists or texts."""

    metrics: dict[str, Any]
    attention: dict[str, Any] = field(default_factory=dict)
    faithfulness: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One use of attention, such as translation: its names, its settings, and the functions that shared code calls.

    - `material(config, cache, codec, say)` returns the `Material`: built-in generated data, or the data of the files
      `config.data.files`, with an index in the folder `cache`. A resumed run passes its own `codec`; `say` is called
      with progress messages.
    - `files(config)` returns every data file that a run uses.
    - `codec(directory, config)` returns the codec of a run directory, loaded from its `codec_files`.
    - `network(config, codec)` returns the untrained model.
    - `encode(codec, example, config)` returns an example as an encoded record; `sizes(record)` returns the lengths of
      the record's padded fields.
    - `collate(records, config, grid=, rows=)` returns records as a batch, which has a method `to(device)`; `grid` and
      `rows` pad the batch as in `regard.data.record_batches.padded`.
    - `outcome(network, batch, config, attention)` returns the loss of a batch as an `Outcome`; if `attention` is true,
      the `Outcome` also holds the attention weights and the samples of hard attention.
    - `predictor(network, codec, config)` returns a `Predictor` with this network.
    - `loaded(network, codec, config, device, **options)` returns a `Predictor` with a trained network on this device;
      if `loaded` is None, the network is moved to the device and `predictor` is called. `loading` names the options.
    - `validate(predictor, examples, config)` returns a few metrics by name that are fast to compute.
    - `judge(predictor, examples, config, explain)` returns all metrics as `Judged`; with `explain`, faithfulness too.
    - `examples(paths, config, codec)` returns the examples of other data files, and a description of them.
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
    asked: Callable[[Any], Mapping[str, Any]]  # returns the input of an example, without its gold answer
    loaded: Callable[..., Any] | None = None
    loading: tuple[str, ...] = ()
    # live(name, predictor) returns an object with further functions for the studio, such as forced prefixes.
    live: Callable[[str, Any], Any] | None = None
    options: tuple[str, ...] = ()  # names of the keyword options of `Predictor.answers`
    aliases: Mapping[str, str] = field(default_factory=dict)  # full names of settings by their short names
    # choosing[setting][value] is the preset that is selected if the user sets this setting to this value.
    choosing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs: Needs = field(default_factory=dict)  # conditions under which the task's settings have an effect
    recorded: tuple[str, ...] = ()  # settings that config.json always contains, even if they have no effect
    # Settings of this task that may change when a run is resumed; `regard.tasks.training` lists those of every task.
    changeable: tuple[str, ...] = ()
    validated: int = 200  # largest number of examples that are passed to `validate`

    def figure(self, name: str) -> Figure | None:
        """Return the `Figure` with this key in `result.json`; None if the task has no such figure."""
        return next((one for one in self.figures if one.name == name), None)
