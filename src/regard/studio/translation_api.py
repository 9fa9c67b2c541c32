"""Interactive translation: the interface of a run that translates, and its answer as JSON."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from regard.studio.limits import LIMITS, RefusedError
from regard.tasks.hypotheses import Answer, Hypothesis

if TYPE_CHECKING:  # imported for type checkers only, so that a studio without runs starts without torch
    from torch import Tensor

    from regard.look.faithfulness import Faithfulness
    from regard.tasks.live_runs import LiveRun


@runtime_checkable
class Translates(Protocol):
    """The interface of a run that translates. A translation begins with the tokens `forced`."""

    @property
    def name(self) -> str: ...

    def translate(self, text: str, *, beams: int, forced: Sequence[str] = ()) -> Answer: ...


@runtime_checkable
class Scores(Protocol):
    """The interface of a run that can be evaluated without some source tokens, to measure faithfulness."""

    def score(self, text: str, target: Sequence[str], place: int, kept: "Tensor") -> "Tensor":
        """Return p(target[place] | target[:place]) for each row of `kept`, which is True at the source tokens kept."""


class Ask(BaseModel):
    """The body of a request for the translation of a text."""

    model_config = ConfigDict(extra="forbid")
    run: Annotated[int, Field(ge=0, le=1000)] = 0
    text: Annotated[str, Field(min_length=1, max_length=LIMITS.text)]
    beams: Annotated[int, Field(ge=1, le=LIMITS.beams)] = 4
    forced: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=LIMITS.tokens)] = []


def translators(runs: Sequence[Any]) -> "list[Translates | None]":
    """Return the interactive translator of each run: the run itself, the translator that its task provides, or None."""
    offered = [run if isinstance(run, Translates) else getattr(run, "more", None) for run in runs]
    return [translator if isinstance(translator, Translates) else None for translator in offered]


def translate(runs: Sequence[Translates | None], ask: Ask) -> dict[str, object]:
    """Return the translations of a text by a run, as JSON."""
    run = _run(runs, ask.run)
    try:
        answer = run.translate(ask.text, beams=ask.beams, forced=tuple(ask.forced))
    except ValueError as error:  # the run cannot translate this text
        raise RefusedError(str(error)[:300]) from None
    if len(answer.source) > LIMITS.tokens or any(len(beam.tokens) > LIMITS.tokens for beam in answer.beams):
        raise RefusedError(f"source and translation must have at most {LIMITS.tokens} tokens", 413)
    if not all(bool(beam.weights.isfinite().all()) and math.isfinite(beam.log_prob) for beam in answer.beams):
        raise RefusedError("the run's weights or probabilities are NaN or infinite: there is nothing to show")
    return {"source": list(answer.source), "beams": [_beam(beam) for beam in answer.beams]}


class Judge(BaseModel):
    """The body of a request for the faithfulness of the weights of one word in a translation."""

    model_config = ConfigDict(extra="forbid")
    run: Annotated[int, Field(ge=0, le=1000)] = 0
    text: Annotated[str, Field(min_length=1, max_length=LIMITS.text)]
    target: Annotated[list[Annotated[str, Field(max_length=100)]], Field(min_length=1, max_length=LIMITS.tokens)]
    place: Annotated[int, Field(ge=0, le=LIMITS.tokens)]


def judge(runs: Sequence[Translates | None], request: Judge) -> "Faithfulness":
    """Return the deletion and sufficiency curves of the attention weights of one word of a translation."""
    from regard.look.faithfulness import faithfulness

    run = _run(runs, request.run)
    if request.place >= len(request.target):
        raise RefusedError(f"place must be from 0 to {len(request.target) - 1}, got {request.place}")
    if not isinstance(run, Scores):
        raise RefusedError("this run cannot be asked again with words left out", 404)
    try:
        weights = run.translate(request.text, beams=1, forced=tuple(request.target)).beams[0].weights[request.place]
    except ValueError as error:
        raise RefusedError(str(error)[:300]) from None
    return faithfulness(
        lambda masks: run.score(request.text, request.target, request.place, masks), weights, orderings=8
    )


def open_run(path: Path) -> "LiveRun":
    """Return the run in a directory; the run may still be training."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is neither a trace nor a run: a run is a directory with a config.json")
    from regard.tasks import live_runs

    return live_runs.open_run(path)


def _run(runs: Sequence[Translates | None], number: int) -> Translates:
    if number >= len(runs):
        raise RefusedError(f"run must be from 0 to {len(runs) - 1}, got {number}", 404)
    run = runs[number]
    if run is None:
        raise RefusedError(f"run {number} does not translate", 404)
    return run


def _beam(beam: Hypothesis) -> dict[str, object]:
    """Return one hypothesis of the beam search as JSON."""
    return {
        "tokens": list(beam.tokens),
        "logProb": beam.log_prob,
        "weights": beam.weights.tolist(),
        "alternatives": [
            [{"token": other.token, "probability": other.probability} for other in others[:8]]
            for others in beam.alternatives
        ],
    }
