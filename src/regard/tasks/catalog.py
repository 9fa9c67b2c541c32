"""The dictionary of all tasks by name."""

from regard.tasks.captioning.task import CAPTIONING
from regard.tasks.driving.task import DRIVING
from regard.tasks.glimpse.task import GLIMPSE
from regard.tasks.reading.task import READING
from regard.tasks.sentiment.task import SENTIMENT
from regard.tasks.speech.task import SPEECH
from regard.tasks.task import Task
from regard.tasks.translation.task import TRANSLATION
from regard.tasks.vqa.task import VQA

_ALL = (TRANSLATION, SENTIMENT, READING, CAPTIONING, VQA, GLIMPSE, SPEECH, DRIVING)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
