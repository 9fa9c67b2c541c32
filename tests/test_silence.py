"""Importing and using the package causes no warning, and prints nothing that was not requested."""

import subprocess
import sys

import pytest

USE = """
import torch, regard
from regard import models, nn, parallel

for folder in (regard, nn, models, parallel):
    for name in folder.__all__:
        getattr(folder, name)
x = torch.randn(2, 4, 7, 8, requires_grad=True) * 1  # not a leaf, as in a model
weight = torch.randn(8, requires_grad=True)
masks = (None, regard.causal(), regard.window(1, 1), regard.padding([3, 7]), torch.ones(7, 7, dtype=torch.bool))
for score in (regard.ScaledDot(), regard.Cosine(), regard.Additive(weight), lambda q, k: -torch.cdist(q, k)):
    for normalize in (regard.Softmax(), regard.Entmax(), regard.Hard()):
        for mask in masks:
            given = {"score": score, "normalize": normalize, "mask": mask, "weights": regard.top(2)}
            regard.attention(x, x, x, **given).output.sum().backward(retain_graph=True)
layer = nn.MultiHeadAttention(8, 2)
layer(torch.randn(1, 3, 8), cache=nn.KeyValueCache(), mask=regard.causal())
layer.load_state_dict(torch.nn.MultiheadAttention(8, 2).state_dict())
encoder = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
with regard.watch(encoder) as trace:
    encoder(torch.randn(2, 6, 32))
trace.html("page.html"), trace.png("map.png"), trace.svg("map.svg"), trace.rollout(), trace._repr_html_()
trace.save("a.trace")
regard.Trace.load("a.trace")
"""


@pytest.mark.process
def test_using_it_prints_nothing(tmp_path):
    """A separate process uses the library with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
