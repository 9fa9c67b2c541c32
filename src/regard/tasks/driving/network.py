"""Builds the driving model from its settings: an encoder of objects and a controller that attends to them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.requests import Request
from regard.data.worlds.traffic_expert import ACTIONS
from regard.models.memory import Memory
from regard.models.scene.controller import Controlled, Controller
from regard.models.scene.object_encoder import SceneEncoder
from regard.tasks.attention_learning import normalizer
from regard.tasks.config import LearningSettings
from regard.tasks.driving.config import ModelSettings

_LEARNING = LearningSettings()


class Driver(nn.Module):
    """Computes actions and steering in traffic scenes.

    The ego vehicle, the first row of a scene, is the query of the attention; the other objects are the keys.
    """

    def __init__(self, encoder: SceneEncoder, controller: Controller) -> None:
        super().__init__()
        self.encoder, self.controller = encoder, controller

    def forward(
        self,
        objects: Float[Tensor, "b n f"],
        present: Bool[Tensor, "b n"],
        *,
        weights: Request | None = None,
    ) -> Controlled:
        """Return the decisions for scenes (b, 1 + objects, features).

        The attention weights are (b, 1, 1 + objects); the weight of the ego vehicle is 0.
        """
        memory = self.encoder(objects, present)
        others = present & (torch.arange(present.shape[1], device=present.device) > 0)
        return self.controller(Memory(memory.keys, memory.values, others, memory.summary), weights=weights)


def build(settings: ModelSettings, features: int, *, learning: LearningSettings = _LEARNING) -> Driver:
    """Return an untrained network for scenes whose objects have `features` features."""
    encoder = SceneEncoder(
        *(features, settings.size), hidden_size=settings.hidden, layers=settings.layers, dropout=settings.dropout
    )
    controller = Controller(
        settings.size,
        actions=len(ACTIONS),
        controls=1,
        size=settings.size,
        heads=settings.heads,
        attention=None if settings.attention == "none" else settings.attention,
        normalize=normalizer(settings.normalize, learning, alpha=settings.alpha),
        dropout=settings.dropout,
    )
    return Driver(encoder, controller)
