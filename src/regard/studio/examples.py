"""Example traces: one for each way in which the viewer draws a trace, each with the small model that computed it.

The weights of an example are computed by `regard.attention` from features of seeded, generated inputs. Therefore it is
known which keys should be attended to, and faithfulness can be measured by running the model without some inputs.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.attention import attention
from regard.core.requests import full
from regard.look.faithfulness import Faithfulness, faithfulness, gradient_times_input
from regard.look.labels import Labels
from regard.look.rollout_records import with_rollouts
from regard.look.trace import Trace
from regard.studio.limits import RefusedError, within


@dataclass(frozen=True, eq=False)
class Answering:
    """A model of one attention call, which predicts one probability for each query.

    p_i = σ(⟨readout_i, Σ_j a_ij x_j⟩ − threshold), where a_ij is the weight of query i on input x_j, σ the logistic
    function, and the dot product is averaged over the heads.
    """

    inputs: Float[Tensor, "k d"]
    query: Float[Tensor, "h q d"]
    readout: Float[Tensor, "q d"]
    threshold: float = 2.0

    def weights(self) -> Float[Tensor, "h q k"]:
        """Return the attention weights of each query over the inputs."""
        weights = attention(self.query, self.inputs[None], self.inputs[None], weights=full()).weights
        assert isinstance(weights, Tensor)
        return weights

    def logit(self, inputs: Float[Tensor, "k d"], row: int, masks: Bool[Tensor, "n k"]) -> Float[Tensor, "n"]:
        """Return the logit of query `row` under n masks, which are True at the inputs that the query may attend to."""
        queries = self.query[:, row : row + 1].expand(len(masks), -1, -1, -1)
        memory = inputs.expand(len(masks), 1, -1, -1)
        output = attention(queries, memory, memory, mask=masks[:, None, None, :]).output
        return (output[:, :, 0] @ self.readout[row]).mean(1) - self.threshold

    def faithfulness(self, row: int, importance: Float[Tensor, "k"]) -> Faithfulness:
        """Return the faithfulness curves of an importance map, of random orderings, and of gradient × input."""
        everything = torch.ones(1, len(self.inputs), dtype=torch.bool)
        gradient = gradient_times_input(lambda inputs: self.logit(inputs, row, everything)[0], self.inputs)
        return faithfulness(
            lambda masks: self.logit(self.inputs, row, masks).sigmoid(),
            importance,
            baselines={"gradient × input": gradient},
            steps=20,
        )


@dataclass(frozen=True, eq=False)
class Example:
    """A trace, and the model that computed the weights, for some of its records by name."""

    trace: Trace
    models: Mapping[str, Answering] = field(default_factory=dict)

    @functools.cached_property
    def shown(self) -> Trace:
        """Return the trace with the attention rollout of each stack of layers as an additional record."""
        return Trace(self.trace.title, with_rollouts(self.trace.records), self.trace.dropped, parts=self.trace.parts)

    def faithfulness(self, record: int, head: int, row: int) -> Faithfulness:
        """Return faithfulness curves of one row of an attention map; RefusedError if its record has no model."""
        seen = self.trace.records[within(record, 0, len(self.trace.records) - 1, "record")]
        within(head, 0, seen.heads - 1, "head")
        within(row, 0, seen.queries - 1, "row")
        if seen.name not in self.models:
            raise RefusedError("a trace keeps where a model looked, not the model: there is nothing to ask again", 404)
        return self.models[seen.name].faithfulness(row, seen.weights(head=head, queries=[row])[0])


def sentiment() -> Example:
    """Return an example of sentiment classification: two classes are queries over the words of a review."""
    worth = {
        "thin": (-2.0, 0.5), "slow": (-1.5, 0.5), "wonderful": (2.5, 0.3), "moved": (2.0, 0.4),
    }  # fmt: skip
    words = _words("The plot is thin and a little slow , but the acting is wonderful and the music moved me .")
    features = torch.tensor([[max(0.0, worth.get(w, (0, 0))[0]), max(0.0, -worth.get(w, (0, 0))[0])] for w in words])
    asks = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    model = Answering(features + 0.08 * noise(len(words), 2), asked_by(asks, 1.8, 0.9), 2.0 * asks, threshold=1.5)
    trace = Trace.from_weights(
        {"class → words": model.weights()},
        title="Which words decide a review",
        rows=["positive", "negative"],
        columns=Labels("tokens", tuple(words)),
    )
    return Example(trace, {"class → words": model})


def reading() -> Example:
    """Return an example of question answering with two records.

    In the first record, the queries are the start and the end of the answer, and the keys are the words of a passage.
    In the second record, the queries are the words of the passage, and the keys are the words of the question.
    """
    passage = _words("Attention was first used for translation in 2014 , by three researchers in Montreal .")
    question = _words("Where was attention first used ?")
    names = ["place", "time", "person", "attention", "first", "use", "in"]
    about = {
        "Attention": "attention", "attention": "attention", "first": "first", "used": "use",
        "2014": "time", "researchers": "person", "Montreal": "place", "Where": "place",
    }  # fmt: skip

    def features(words: list[str], seed: int) -> Tensor:
        rows = [[float(about.get(word) == name) for name in names] for word in words]
        return 2.0 * torch.tensor(rows) + 0.1 * noise(len(words), len(names), seed)

    memory, question_inputs = features(passage, 5), features(question, 6)
    # The key of the "in" before the place has a large feature "in", the key of the "in" before the year a smaller one.
    memory[passage.index("Montreal") - 1, names.index("in")] = 2.0
    memory[passage.index("2014") - 1, names.index("in")] = 1.0
    ends = torch.tensor([[0.3, 0, 0, 0, 0, 0, 1.0], [1.0, 0.1, 0, 0, 0, 0, 0]])
    pointer = Answering(memory, asked_by(ends, 2.2, 1.1), 2.0 * ends, threshold=1.5)
    aligned = Answering(question_inputs, asked_by(memory, 1.6, 0.8), memory, threshold=1.0)
    weights = {"answer → passage": pointer.weights(), "passage → question": aligned.weights()}
    trace = Trace.from_weights(weights, title="A question, and the span that answers it")
    text, query = Labels("tokens", tuple(passage)), Labels("tokens", tuple(question))
    trace.label(rows=["start", "end"], columns=text, of="answer*")
    trace.label(rows=text, columns=query, of="passage*")
    return Example(trace, {"answer → passage": pointer, "passage → question": aligned})


def scene() -> Example:
    """Return an example of driving: the queries are possible actions of a vehicle, the keys are the objects around it.

    The vehicle is at the origin and heads along x.
    """
    # Each entry is an object: name, x ahead and y to the right in metres, heading in radians, speed in m/s.
    seen = [
        ("us", 0.0, 0.0, 0.0, 11.0), ("lorry, braking", 17.0, -0.1, 0.0, 3.0), ("car behind", -14.0, 0.1, 0.0, 12.0),
        ("car, left lane", 4.0, -3.6, 0.0, 13.0), ("oncoming car", 34.0, -7.6, 3.14, 12.0),
        ("cyclist", 25.0, 3.0, 0.0, 5.0), ("pedestrian", 36.0, 6.6, -1.57, 1.3), ("parked car", 7.0, 4.6, 0.0, 0.0),
    ]  # fmt: skip
    features = []
    for name, x, y, _, speed in seen:
        # `closing` is positive for a slower object in the lane of the ego vehicle.
        closing = max(0.0, (11.0 - speed) / 8) if x > 0 and abs(y) < 1.8 else 0.0
        left = 1.0 if -20 < x < 30 and 1.8 < -y < 5 else 0.0
        walking = (1.2 if name == "pedestrian" else 0.7 if name == "cyclist" else 0.0) * (x > 0)
        features.append([2.0 * closing, 1.6 * left, 1.4 * walking, 0.8 if x == 0 else 0.0])
    asks = torch.tensor([[1.0, 0.0, 0.35, 0.0], [0.0, 1.0, 0.2, 0.0], [0.1, 0.1, 0.1, 1.0]])
    inputs = torch.tensor(features) + 0.05 * noise(len(seen), 4, 9)
    model = Answering(inputs, asked_by(asks, 2.0, 0.9), 2.0 * asks, threshold=1.5)
    names, xs, ys, headings, speeds = zip(*seen, strict=True)
    extra = {"x": list(xs), "y": list(ys), "heading": list(headings), "speed": list(speeds)}
    trace = Trace.from_weights(
        {"driver → objects": model.weights()},
        title="Traffic, and the lorry that makes us brake",
        rows=["brake", "stay out of the left lane", "go on"],
        columns=Labels("objects", tuple(names), extra),
    )
    return Example(trace, {"driver → objects": model})


def _image() -> Example:
    from regard.studio.picture_examples import image

    return image()


def _sound() -> Example:
    from regard.studio.picture_examples import sound

    return sound()


def _words(text: str) -> list[str]:
    return text.split()


def asked_by(asks: Float[Tensor, "q d"], *sharpness: float) -> Float[Tensor, "h q d"]:
    """Return the queries with one head for each factor in `sharpness`: each head is multiplied by its factor and √d.

    The factor √d cancels the division of scores by √d in scaled dot products.
    """
    return torch.stack([sharp * asks for sharp in sharpness]) * asks.shape[-1] ** 0.5


def noise(rows: int, columns: int, seed: int = 4) -> Float[Tensor, "r c"]:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


BUILD: dict[str, Callable[[], Example]] = {
    "image": _image,
    "sound": _sound,
    "sentiment": sentiment,
    "reading": reading,
    "scene": scene,
}
