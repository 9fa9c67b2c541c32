"""Models: encoders that compute a memory, decoders that attend to the memory, and `EncoderDecoder`, which joins them.

A memory holds the keys and values that a decoder attends to. Of regard, the models import `nn`, `core` and `kernels`.

- `frame`: `EncoderDecoder`
- `memory`: the records that encoders and decoders exchange: `Memory`, `Decoded`, `Step`
- `memory_words`: memories with word embeddings as keys or values
- `recurrent/`: GRU and LSTM encoder and decoder
- `transformer/`: Transformer encoder and decoder
- `vision/`: image encoders, visual attention, camera driver
- `speech/`: pyramidal encoder
- `scene/`: encoder of objects, driving controller
- `classifier`: attention that pools a memory, then a classification layer
- `stacked_attention`: classifies the answer to a question about a memory, by attention in several hops
- `span_pointer`: predicts start and end of an answer in a passage
- `ngrams`: encoder of hashed n-grams
- `posterior`: attention weights corrected by Bayes' rule when the next word is known
- `quantized`: int8 and packed copies of a model for inference on the CPU

Each public name is imported from its module when it is first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

# The module of each public name.
_HOME = {
    "Memory": "regard.models.memory",
    "Decoded": "regard.models.memory",
    "Step": "regard.models.memory",
    "EncoderDecoder": "regard.models.frame",
    "RecurrentEncoder": "regard.models.recurrent.encoder",
    "RecurrentDecoder": "regard.models.recurrent.decoder",
    "TransformerEncoder": "regard.models.transformer.encoder_decoder",
    "TransformerDecoder": "regard.models.transformer.encoder_decoder",
    "Classifier": "regard.models.classifier",
    "StackedClassifier": "regard.models.stacked_attention",
    "SpanPointer": "regard.models.span_pointer",
    "Controller": "regard.models.scene.controller",
    "ImageEncoder": "regard.models.vision.image_encoder",
    "SpeechEncoder": "regard.models.speech.pyramidal_encoder",
    "SceneEncoder": "regard.models.scene.object_encoder",
    "RecurrentVisualAttention": "regard.models.vision.visual_attention",
    "Recurrence": "regard.models.recurrent.cells",
    "Classified": "regard.models.classifier",
    "Stacked": "regard.models.stacked_attention",
    "Pointed": "regard.models.span_pointer",
    "best_span": "regard.models.span_pointer",
    "Controlled": "regard.models.scene.controller",
    "CameraDriver": "regard.models.vision.camera_driver",
    "FrameEncoder": "regard.models.vision.camera_driver",
    "Driven": "regard.models.vision.camera_driver",
    "Looked": "regard.models.vision.visual_attention",
    "looked_loss": "regard.models.vision.visual_attention",
    "EncoderStack": "regard.models.transformer.stacks",
    "DecoderStack": "regard.models.transformer.stacks",
    "compile_layers": "regard.models.transformer.layer_compilation",
    "quantize": "regard.models.quantized",
    "pack": "regard.models.quantized",
}

__all__ = [*_HOME]

if TYPE_CHECKING:  # type checkers and editors need the public names as imports
    from regard.models.classifier import Classified as Classified
    from regard.models.classifier import Classifier as Classifier
    from regard.models.frame import EncoderDecoder as EncoderDecoder
    from regard.models.memory import Decoded as Decoded
    from regard.models.memory import Memory as Memory
    from regard.models.memory import Step as Step
    from regard.models.quantized import pack as pack
    from regard.models.quantized import quantize as quantize
    from regard.models.recurrent.cells import Recurrence as Recurrence
    from regard.models.recurrent.decoder import RecurrentDecoder as RecurrentDecoder
    from regard.models.recurrent.encoder import RecurrentEncoder as RecurrentEncoder
    from regard.models.scene.controller import Controlled as Controlled
    from regard.models.scene.controller import Controller as Controller
    from regard.models.scene.object_encoder import SceneEncoder as SceneEncoder
    from regard.models.span_pointer import Pointed as Pointed
    from regard.models.span_pointer import SpanPointer as SpanPointer
    from regard.models.span_pointer import best_span as best_span
    from regard.models.speech.pyramidal_encoder import SpeechEncoder as SpeechEncoder
    from regard.models.stacked_attention import Stacked as Stacked
    from regard.models.stacked_attention import StackedClassifier as StackedClassifier
    from regard.models.transformer.encoder_decoder import TransformerDecoder as TransformerDecoder
    from regard.models.transformer.encoder_decoder import TransformerEncoder as TransformerEncoder
    from regard.models.transformer.layer_compilation import compile_layers as compile_layers
    from regard.models.transformer.stacks import DecoderStack as DecoderStack
    from regard.models.transformer.stacks import EncoderStack as EncoderStack
    from regard.models.vision.camera_driver import CameraDriver as CameraDriver
    from regard.models.vision.camera_driver import Driven as Driven
    from regard.models.vision.camera_driver import FrameEncoder as FrameEncoder
    from regard.models.vision.image_encoder import ImageEncoder as ImageEncoder
    from regard.models.vision.visual_attention import Looked as Looked
    from regard.models.vision.visual_attention import RecurrentVisualAttention as RecurrentVisualAttention
    from regard.models.vision.visual_attention import looked_loss as looked_loss
else:  # type checkers must not see this function, because __getattr__ would make every name valid for them

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
