"""Layers converted from torch's multi-head attention, or loaded from its checkpoints, have the same outputs."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from regard.core.normalizers import Sparsemax
from regard.core.requests import full
from regard.core.scores import ScaledDot
from regard.nn.convert import torch_masks
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import Rotary
from regard.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

BATCH, QUERIES, KEYS, SIZE, HEADS = 3, 5, 7, 12, 4
SIZES = [{}, {"kdim": 10}, {"vdim": 11}, {"kdim": 10, "vdim": 11}, {"kdim": 10, "vdim": 10}]
OPTIONS = list(itertools.product(SIZES, (True, False), (True, False)))
LOWER = torch.ones(QUERIES, KEYS).triu(2).bool()  # True = masked, as in torch; every query may attend to a key
# True marks padding; every sequence has at least one real key.
LATE = torch.arange(KEYS) >= torch.tensor([[7], [4], [1]])
PAIR_MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": LOWER,
    "float": torch.randn(QUERIES, KEYS, generator=torch.Generator().manual_seed(5)),
    "minus infinity": torch.zeros(QUERIES, KEYS).masked_fill(LOWER, -torch.inf),
    "bool by head": LOWER.expand(BATCH * HEADS, -1, -1) & (torch.arange(BATCH * HEADS) % 3 > 0)[:, None, None],
    "float by head": torch.randn(BATCH * HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(6)),
}
KEY_MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": LATE,
    "float": torch.zeros(BATCH, KEYS).masked_fill(LATE, -torch.inf),
}
# torch does not accept a bool mask beside a float mask, so these combinations are left out.
MASKS = [
    (pair, key)
    for pair, key in itertools.product(PAIR_MASKS, KEY_MASKS)
    if "none" in (pair, key) or ("bool" in pair) == ("bool" in key)
]


def theirs_of(sizes: dict[str, int], bias: bool, batch_first: bool, **more: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(SIZE, HEADS, bias=bias, batch_first=batch_first, **sizes, **more)
    with torch.no_grad():  # biases are set to random numbers, because biases of 0 would hide errors
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return layer


def sources(sizes: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(BATCH, QUERIES, SIZE),
        torch.randn(BATCH, KEYS, sizes.get("kdim", SIZE)),
        torch.randn(BATCH, KEYS, sizes.get("vdim", SIZE)),
    )


def turned(layer: nn.MultiheadAttention, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors if layer.batch_first else tuple(t.transpose(0, 1) for t in tensors)


@pytest.mark.slow
@pytest.mark.parametrize(("pair_mask", "key_mask"), MASKS)
def test_the_same_outputs_and_weights(pair_mask: str, key_mask: str) -> None:
    """Outputs equal torch's for every size, with and without biases, for batch-first and length-first inputs, with one
    kind of mask."""
    attn_mask, padding = PAIR_MASKS[pair_mask], KEY_MASKS[key_mask]
    worst = 0.0
    for sizes, bias, batch_first in OPTIONS:
        theirs = theirs_of(sizes, bias, batch_first)
        ours = MultiHeadAttention.from_torch(theirs, batch_first=True)
        inputs = sources(sizes)
        right, weights = theirs(
            *turned(theirs, inputs), attn_mask=attn_mask, key_padding_mask=padding, average_attn_weights=False
        )
        mask, added = torch_masks(attn_mask, padding, heads=HEADS)
        found = ours(*inputs, mask=mask, bias=added, weights=full())
        right = right if batch_first else right.transpose(0, 1)
        assert_close(found.output, right, rtol=0, atol=2e-6)
        assert_close(found.weights, weights, rtol=0, atol=1e-6)
        unasked = ours(*inputs, mask=mask, bias=added).output
        assert_close(unasked, right, rtol=0, atol=2e-6)
        worst = max(worst, *(float((each - right).detach().abs().max()) for each in (found.output, unasked)))
    assert worst < 2e-6


@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_in_training_and_inference(bias: bool) -> None:
    """Outputs in training and in inference, for which torch runs different code, and gradients equal torch's."""
    theirs = theirs_of({}, bias, True)
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(BATCH, QUERIES, SIZE, requires_grad=True)
    upstream = torch.randn(BATCH, QUERIES, SIZE)
    right, found = theirs(x, x, x, need_weights=False)[0], ours(x).output
    assert_close(found, right, rtol=0, atol=2e-6)
    (own,) = torch.autograd.grad(found, x, upstream, retain_graph=True)
    (expected,) = torch.autograd.grad(right, x, upstream, retain_graph=True)
    assert_close(own, expected, rtol=0, atol=1e-5)
    assert ours.projection.weight is not None
    assert theirs.in_proj_weight is not None
    (own,) = torch.autograd.grad(found, ours.projection.weight, upstream)
    (expected,) = torch.autograd.grad(right, theirs.in_proj_weight, upstream)
    assert_close(own, expected, rtol=0, atol=1e-5)
    theirs.eval()
    ours.eval()
    with torch.no_grad():
        assert_close(ours(x).output, theirs(x, x, x, need_weights=False)[0], rtol=0, atol=2e-6)


def test_in_float64_they_agree_to_the_last_digits() -> None:
    theirs = theirs_of({"kdim": 10, "vdim": 11}, True, True).double()
    ours = MultiHeadAttention.from_torch(theirs)
    inputs = tuple(t.double() for t in sources({"kdim": 10, "vdim": 11}))
    assert ours.output.weight.dtype == torch.float64
    assert_close(ours(*inputs).output, theirs(*inputs)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize(("sizes", "bias", "batch_first"), OPTIONS)
def test_back_to_torch_every_number_is_the_same(sizes: dict[str, int], bias: bool, batch_first: bool) -> None:
    theirs = theirs_of(sizes, bias, batch_first, dropout=0.3).eval()
    back = MultiHeadAttention.from_torch(theirs, batch_first=True).to_torch(batch_first=batch_first)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    assert (back.dropout, back.training, back.batch_first) == (0.3, False, batch_first)
    inputs = turned(theirs, sources(sizes))
    assert torch.equal(back(*inputs)[0], theirs(*inputs)[0])


@pytest.mark.parametrize(("sizes", "bias", "batch_first"), OPTIONS)
def test_a_checkpoint_of_torch_loads(sizes: dict[str, int], bias: bool, batch_first: bool) -> None:
    """A checkpoint of torch also loads if the layer is part of a larger, deep-copied model; loading does not change the
    state dict."""
    theirs = theirs_of(sizes, bias, batch_first)
    key_size, value_size = sizes.get("kdim", SIZE), sizes.get("vdim", SIZE)
    ours = MultiHeadAttention(SIZE, HEADS, key_size=key_size, value_size=value_size, bias=bias)
    model = copy.deepcopy(nn.ModuleDict({"attention": ours, "head": nn.Linear(SIZE, 2)}))
    state = nn.ModuleDict({"attention": theirs, "head": nn.Linear(SIZE, 2)}).state_dict()
    names = list(state)
    model.load_state_dict(state)
    assert list(state) == names
    right = MultiHeadAttention.from_torch(theirs, batch_first=True).state_dict()
    found = model["attention"].state_dict()
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)
    model.load_state_dict(model.state_dict())  # regard's own state dict loads too


def test_a_checkpoint_with_an_extra_key_is_refused() -> None:
    state = nn.MultiheadAttention(SIZE, HEADS, add_bias_kv=True).state_dict()
    with pytest.raises(ValueError, match="bias_k: a layer made with add_bias_kv=True cannot be loaded"):
        MultiHeadAttention(SIZE, HEADS).load_state_dict(state)


def test_a_checkpoint_of_another_size_is_refused() -> None:
    state = nn.MultiheadAttention(SIZE + HEADS, HEADS).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for projection\.weight"):
        MultiHeadAttention(SIZE, HEADS).load_state_dict(state)


def test_a_layer_made_here_goes_to_torch() -> None:
    ours = MultiHeadAttention(SIZE, HEADS, key_size=10, score=ScaledDot(scale=3**-0.5)).eval()
    query, memory = torch.randn(BATCH, QUERIES, SIZE), torch.randn(BATCH, KEYS, 10)
    theirs = ours.to_torch()
    assert_close(theirs(query, memory, memory)[0], ours(query, memory).output, rtol=0, atol=2e-6)
    with torch.no_grad():
        theirs.out_proj.weight.zero_()
    # Changing torch's layer does not change ours, because `to_torch` copies the weights.
    assert ours.output.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("option", "message"),
    [("add_bias_kv", "cannot take add_bias_kv=True"), ("add_zero_attn", "cannot take add_zero_attn=True")],
)
def test_options_without_a_counterpart_are_refused(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(SIZE, HEADS, **{option: True}))


SEQUENCE_FIRST: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "attention": (nn.MultiheadAttention, MultiHeadAttention.from_torch),
    "encoder layer": (nn.TransformerEncoderLayer, TransformerEncoderLayer.from_torch),
    "decoder layer": (nn.TransformerDecoderLayer, TransformerDecoderLayer.from_torch),
}


@pytest.mark.parametrize("kind", SEQUENCE_FIRST)
def test_a_layer_that_takes_the_length_first_is_refused_until_told(kind: str) -> None:
    """A torch layer for inputs (length, batch, size) is converted only if the caller passes `batch_first=True`."""
    made, from_torch = SEQUENCE_FIRST[kind]
    theirs = made(SIZE, HEADS)
    message = r"batch_first=False .* \(length, batch, size\): .* \(batch, length, size\); write .*batch_first=True"
    with pytest.raises(ValueError, match=message):
        from_torch(theirs)
    with pytest.raises(ValueError, match="batch_first of from_torch must be True or left out, got False"):
        from_torch(theirs, batch_first=False)
    assert isinstance(from_torch(theirs, batch_first=True), nn.Module)
    assert isinstance(from_torch(made(SIZE, HEADS, batch_first=True)), nn.Module)


def test_only_torchs_own_module_is_taken(as_installed: None) -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.MultiheadAttention, got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(3, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": "additive"}, "needs score scaled_dot, got additive"),
        ({"score": ScaledDot(scale=1.0)}, "needs scaled_dot with scale 1/√4 and no softcap"),
        ({"score": ScaledDot(softcap=5.0)}, "needs scaled_dot with scale 1/√4 and no softcap"),
        ({"normalize": Sparsemax()}, "needs softmax, got sparsemax"),
        ({"positions": Rotary(4)}, "needs a layer without positions, got Rotary"),
        ({"kv_heads": 1}, "as many kv_heads as heads .* 1 kv_heads"),
        ({"head_size": 6}, "size = heads · head_size, got size 12, 3 heads of size 6"),
    ],
)
def test_layers_torch_does_not_have_stay_here(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(SIZE, 3, **arguments).to_torch()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_frozen_stays_frozen(sizes: dict[str, int]) -> None:
    """Frozen parameters stay frozen; a weight that joins torch's key and value weights is trained if torch's key or
    value weight was."""
    theirs = theirs_of(sizes, True, True).requires_grad_(False)
    assert not [name for name, p in MultiHeadAttention.from_torch(theirs).named_parameters() if p.requires_grad]
    theirs.out_proj.bias.requires_grad_()
    learned = [name for name, p in MultiHeadAttention.from_torch(theirs).named_parameters() if p.requires_grad]
    assert learned == ["output.bias"]
    if theirs.in_proj_weight is None:
        theirs.v_proj_weight.requires_grad_()
        learned = [name for name, p in MultiHeadAttention.from_torch(theirs).named_parameters() if p.requires_grad]
        assert len(learned) == 2
        assert {name.split(".")[1] for name in learned} <= {"bias", "value_weight", "memory_weight"}


@pytest.mark.parametrize(("own", "said"), [({}, "12 and 12"), ({"key_size": 10}, "10 and 10")])
def test_a_checkpoint_with_other_key_sizes_is_refused_by_its_own_names(own: dict[str, int], said: str) -> None:
    theirs = nn.MultiheadAttention(SIZE, HEADS, kdim=10, vdim=11).state_dict()
    with pytest.raises(ValueError, match=f"^q_proj_weight: .* key_size=10 and value_size=11, this layer has {said}"):
        MultiHeadAttention(SIZE, HEADS, **own).load_state_dict(theirs)
