"""The model of visual question answering: encoders of image and question, and stacked attention over the image."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor, nn

from regard.core.requests import Request
from regard.models.memory import Memory
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.models.stacked_attention import Stacked, StackedClassifier
from regard.models.vision.convolutional import ConvolutionalNetwork
from regard.models.vision.image_encoder import ImageEncoder
from regard.tasks.attention_learning import normalizer
from regard.tasks.config import LearningSettings
from regard.tasks.image_inputs import Grid, scaled
from regard.tasks.vqa.config import ModelSettings
from regard.train.memory_check import count_parameters

_LEARNING = LearningSettings()


class VisualAnswerer(nn.Module):
    """The model of visual question answering; if the image encoder `image` is None, it uses only the question."""

    def __init__(self, question: RecurrentEncoder, image: ImageEncoder | None, classifier: StackedClassifier) -> None:
        super().__init__()
        self.question, self.image, self.classifier = question, image, classifier

    def forward(
        self,
        images: UInt8[Tensor, "b c height width"],
        questions: Int[Tensor, "b n m"],
        *,
        weights: Request | None = None,
    ) -> Stacked:
        """Return the logits of the answers to n questions, of up to m words, about each image.

        Words are numbered from 1; padding is 0.
        """
        lengths = (questions != 0).sum(-1)
        # A question that is padding gets the length 1, so that no row is empty; its answer is ignored.
        summary = self.question(questions.flatten(0, 1), lengths.flatten().clamp_min(1)).summary
        query = summary.unflatten(0, questions.shape[:2])
        if self.image is None:
            nothing = query.new_zeros(len(query), 0, query.shape[-1])
            memory = Memory(nothing, nothing, None, nothing.sum(1))
        else:
            memory = self.image(scaled(images).contiguous(memory_format=torch.channels_last))
        return self.classifier(memory, query, weights=weights)

    def grid(self, side: int) -> Grid:
        """Return the numbers of rows and columns of cells of an image of `side` × `side` pixels."""
        return (0, 0) if self.image is None else self.image.grid(side, side)


def build(
    settings: ModelSettings, vocabulary: int, answers: int, *, learning: LearningSettings = _LEARNING
) -> VisualAnswerer:
    """Return a model for a vocabulary of this size and this number of possible answers.

    With `attention="none"`, the classifier gets the mean of the image's cells, and a wider hidden layer, so that the
    model has about as many parameters as with attention.
    """
    question = RecurrentEncoder(
        vocabulary, settings.size, bidirectional=False, embedding_size=settings.embedding, dropout=settings.dropout
    )
    image = None
    if settings.image:
        backbone = ConvolutionalNetwork(widths=settings.widths, kernels=settings.kernels)
        image = ImageEncoder(settings.size, backbone=backbone)
    attends = settings.image and settings.attention != "none"
    features = settings.features if attends or not settings.image else _twin_features(settings, answers)
    classifier = StackedClassifier(
        answers,
        memory_size=settings.size,
        hops=settings.hops,
        attention=settings.attention if attends else None,
        features=features,
        counts=settings.counts,
        normalize=normalizer(settings.normalize, learning, alpha=settings.alpha),
        dropout=settings.dropout,
    )
    return VisualAnswerer(question, image, classifier)


def _twin_features(settings: ModelSettings, answers: int) -> int:
    """Return the hidden size with which a classifier without attention has about as many parameters as one with
    attention."""
    with torch.device("meta"):
        twin = StackedClassifier(
            answers, memory_size=settings.size, hops=settings.hops, features=settings.features, counts=settings.counts
        )
    return max(1, round((count_parameters(twin) - answers) / (2 * (2 * settings.size + 1) + answers)))
