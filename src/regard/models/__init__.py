"""Models: encoders that make a memory, decoders that ask it, one frame for all. Imports nn, look and core.

The names below are imported when first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

# Every public name and the module it lives in.
_HOME = {
    "Memory": "regard.models.memory",
    "Decoded": "regard.models.memory",
    "Step": "regard.models.memory",
    "EncoderDecoder": "regard.models.frame",
    "RecurrentEncoder": "regard.models.recurrent_encoder",
    "RecurrentDecoder": "regard.models.recurrent_decoder",
    "TransformerEncoder": "regard.models.transformer",
    "TransformerDecoder": "regard.models.transformer",
    "Classifier": "regard.models.classifier",
    "StackedClassifier": "regard.models.stacked",
    "SpanPointer": "regard.models.pointer",
    "Controller": "regard.models.controller",
    "ImageEncoder": "regard.models.image",
    "SpeechEncoder": "regard.models.speech",
    "SceneEncoder": "regard.models.scene",
    "RecurrentVisualAttention": "regard.models.visual",
    "Recurrence": "regard.models.recurrent_cells",
    "Classified": "regard.models.classifier",
    "Stacked": "regard.models.stacked",
    "Pointed": "regard.models.pointer",
    "best_span": "regard.models.pointer",
    "Controlled": "regard.models.controller",
    "CameraDriver": "regard.models.camera",
    "FrameEncoder": "regard.models.camera",
    "Driven": "regard.models.camera",
    "Looked": "regard.models.visual",
    "looked_loss": "regard.models.visual",
    "EncoderStack": "regard.models.transformer_stack",
    "DecoderStack": "regard.models.transformer_stack",
    "sequence_loss": "regard.models.transformer_training",
    "compile_layers": "regard.models.transformer_training",
    "CapturedStep": "regard.models.transformer_training",
    "quantize": "regard.models.quantized",
    "pack": "regard.models.quantized",
}

__all__ = [*_HOME]

if TYPE_CHECKING:  # the same list, for readers that do not run the code
    from regard.models.camera import CameraDriver as CameraDriver
    from regard.models.camera import Driven as Driven
    from regard.models.camera import FrameEncoder as FrameEncoder
    from regard.models.classifier import Classified as Classified
    from regard.models.classifier import Classifier as Classifier
    from regard.models.controller import Controlled as Controlled
    from regard.models.controller import Controller as Controller
    from regard.models.frame import EncoderDecoder as EncoderDecoder
    from regard.models.image import ImageEncoder as ImageEncoder
    from regard.models.memory import Decoded as Decoded
    from regard.models.memory import Memory as Memory
    from regard.models.memory import Step as Step
    from regard.models.pointer import Pointed as Pointed
    from regard.models.pointer import SpanPointer as SpanPointer
    from regard.models.pointer import best_span as best_span
    from regard.models.quantized import pack as pack
    from regard.models.quantized import quantize as quantize
    from regard.models.recurrent_cells import Recurrence as Recurrence
    from regard.models.recurrent_decoder import RecurrentDecoder as RecurrentDecoder
    from regard.models.recurrent_encoder import RecurrentEncoder as RecurrentEncoder
    from regard.models.scene import SceneEncoder as SceneEncoder
    from regard.models.speech import SpeechEncoder as SpeechEncoder
    from regard.models.stacked import Stacked as Stacked
    from regard.models.stacked import StackedClassifier as StackedClassifier
    from regard.models.transformer import TransformerDecoder as TransformerDecoder
    from regard.models.transformer import TransformerEncoder as TransformerEncoder
    from regard.models.transformer_stack import DecoderStack as DecoderStack
    from regard.models.transformer_stack import EncoderStack as EncoderStack
    from regard.models.transformer_training import CapturedStep as CapturedStep
    from regard.models.transformer_training import compile_layers as compile_layers
    from regard.models.transformer_training import sequence_loss as sequence_loss
    from regard.models.visual import Looked as Looked
    from regard.models.visual import RecurrentVisualAttention as RecurrentVisualAttention
    from regard.models.visual import looked_loss as looked_loss
else:  # hidden from checkers, which would take it to mean that any name exists

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(
                f"module 'regard.models' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
            )
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
