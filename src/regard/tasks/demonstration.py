"""The task that `regard demo` trains, and the texts that it prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from regard.tasks.task import Task
from regard.tasks.translation.task import TRANSLATION


@dataclass(frozen=True)
class Demonstration:
    """A task and a preset to train, the inputs to predict after training, and the texts to print."""

    task: Task
    preset: str
    heading: str
    about: str  # text printed before training; `{train}` is replaced by the number of training examples
    inputs: tuple[str, ...]
    answers: str  # heading printed above the answers
    attention: tuple[str, str]  # heading of the attention map, and an explanation of the map
    # Commands for the user to try next, by their headings; `{run}` is replaced by the run's directory.
    more: Mapping[str, str] = field(default_factory=dict)


DEMO = Demonstration(
    task=TRANSLATION,
    preset="tiny",
    heading="English → Chinese",
    about="A grammar writes {train:,} sentence pairs with known word alignments. A recurrent model with additive "
    "attention learns from the pairs alone: the alignments are used only to evaluate it.",
    inputs=(
        "Tom chases Jerry",
        "The teacher did not see the black cat.",
        "Where is the doctor's car?",
        "Two students are reading a book in the library.",
        "Tomorrow the girl will buy three apples.",
    ),
    answers="Five translations",
    attention=("Where each word came from", "row: the word written; column: the word it looked at"),
    more={
        "translate": "regard predict {run} 'The cat sleeps under the table.'",
        "without attention": "regard train translation --preset tiny --set attention=none",
        "your own text": "regard train translation --data train.en --data train.de",
    },
)
