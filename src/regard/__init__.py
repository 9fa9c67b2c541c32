"""Attention for PyTorch: every mechanism through one call with one definition, and inspection of the weights.

The names below are defined in `regard.core`, `regard.look` and `regard.tasks` and imported at first use, so `import
regard` itself is fast. `regard.nn` has the layers, `regard.models` the models and `regard.parallel` attention over
process groups; the other folders are imported by name.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Every public name, and the module that defines it.
_HOME = {
    "attention": "regard.core.attention",
    "explain": "regard.core.attention",
    "Attended": "regard.core.attended",
    "Plan": "regard.core.attention",
    "Score": "regard.core.scores",
    "Dot": "regard.core.scores",
    "ScaledDot": "regard.core.scores",
    "Cosine": "regard.core.scores",
    "Bilinear": "regard.core.scores",
    "Additive": "regard.core.scores",
    "Normalizer": "regard.core.normalizers",
    "Softmax": "regard.core.normalizers",
    "Sparsemax": "regard.core.normalizers",
    "Entmax": "regard.core.normalizers",
    "Sigmoid": "regard.core.normalizers",
    "Hard": "regard.core.normalizers",
    "Mask": "regard.core.masks",
    "causal": "regard.core.masks",
    "window": "regard.core.masks",
    "padding": "regard.core.masks",
    "segments": "regard.core.masks",
    "dense": "regard.core.masks",
    "Bias": "regard.core.biases",
    "alibi": "regard.core.biases",
    "relative": "regard.core.biases",
    "Request": "regard.core.requests",
    "Top": "regard.core.requests",
    "full": "regard.core.requests",
    "rows": "regard.core.requests",
    "top": "regard.core.requests",
    "received": "regard.core.requests",
    "entropy": "regard.core.requests",
    "logsumexp": "regard.core.requests",
    "merge": "regard.core.merging",
    "reinforce": "regard.core.hard",
    "Reinforced": "regard.core.hard",
    "linear_attention": "regard.core.linear",
    "PerformerFeatures": "regard.core.linear",
    "EluFeatures": "regard.core.linear",
    "watch": "regard.look.watch",
    "Trace": "regard.look.trace",
    "Record": "regard.look.attention_records",
    "Labels": "regard.look.labels",
    "load": "regard.tasks.loading",
}
_FOLDERS = ("nn", "models", "parallel")  # public subpackages, imported at first use
# More subpackages that are imported at first use; dir() does not list them.
_MORE = ("bench", "cli", "core", "data", "decode", "look", "studio", "tasks", "train")

__all__ = ["__version__", *_HOME, *_FOLDERS]

if TYPE_CHECKING:  # repeats the public names for type checkers and editors
    from regard import models as models
    from regard import nn as nn
    from regard import parallel as parallel
    from regard.core.attended import Attended as Attended
    from regard.core.attention import Plan as Plan
    from regard.core.attention import attention as attention
    from regard.core.attention import explain as explain
    from regard.core.biases import Bias as Bias
    from regard.core.biases import alibi as alibi
    from regard.core.biases import relative as relative
    from regard.core.hard import Reinforced as Reinforced
    from regard.core.hard import reinforce as reinforce
    from regard.core.linear import EluFeatures as EluFeatures
    from regard.core.linear import PerformerFeatures as PerformerFeatures
    from regard.core.linear import linear_attention as linear_attention
    from regard.core.masks import Mask as Mask
    from regard.core.masks import causal as causal
    from regard.core.masks import dense as dense
    from regard.core.masks import padding as padding
    from regard.core.masks import segments as segments
    from regard.core.masks import window as window
    from regard.core.merging import merge as merge
    from regard.core.normalizers import Entmax as Entmax
    from regard.core.normalizers import Hard as Hard
    from regard.core.normalizers import Normalizer as Normalizer
    from regard.core.normalizers import Sigmoid as Sigmoid
    from regard.core.normalizers import Softmax as Softmax
    from regard.core.normalizers import Sparsemax as Sparsemax
    from regard.core.requests import Request as Request
    from regard.core.requests import Top as Top
    from regard.core.requests import entropy as entropy
    from regard.core.requests import full as full
    from regard.core.requests import logsumexp as logsumexp
    from regard.core.requests import received as received
    from regard.core.requests import rows as rows
    from regard.core.requests import top as top
    from regard.core.scores import Additive as Additive
    from regard.core.scores import Bilinear as Bilinear
    from regard.core.scores import Cosine as Cosine
    from regard.core.scores import Dot as Dot
    from regard.core.scores import ScaledDot as ScaledDot
    from regard.core.scores import Score as Score
    from regard.look.attention_records import Record as Record
    from regard.look.labels import Labels as Labels
    from regard.look.trace import Trace as Trace
    from regard.look.watch import watch as watch
    from regard.tasks.loading import load as load
else:  # for type checkers this branch does not exist: with __getattr__, they would accept any name

    def __getattr__(name: str) -> object:
        if name in (*_FOLDERS, *_MORE):
            return import_module(f"regard.{name}")
        if name not in _HOME:
            # With `name` and `obj`, Python's own traceback suggests the nearest public name.
            raise AttributeError(f"module 'regard' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value  # later accesses find the global variable and do not call __getattr__
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
