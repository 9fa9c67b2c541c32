"""Inference on the CPU: copies of a model with int8 matrix products, or with float32 weights packed in advance.

With int8, weights are rounded once, with a scale for each output. Inputs are rounded at run time, either with one scale
for the whole tensor, which is fastest because torch does it in one call, or with one scale for each row, so that the
result of a row does not depend on the other rows. Products are summed in int32. Everything else stays float32:
embeddings, normalisations, softmax, recurrent cells and a recurrent decoder's readout. Bhandare et al. 2019 describe
int8 for the Transformer.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.recurrent.decoder import RecurrentDecoder
from regard.nn.projection import HeadProjection

Model = TypeVar("Model", bound=nn.Module)
_TINY = 1e-30  # lower bound of a quantization scale, so that a row of zeros has a scale with a finite inverse


def quantize(model: Model, *, scales: Literal["tensor", "row"] | None = None) -> Model:
    """Return a copy of a model for inference on the CPU with int8 matrix products; the given model does not change.

    Linear layers, the projections of multi-head attention and a Transformer decoder's output layer are rounded.
    `scales` are those of the input of a product: "tensor", one scale for the whole tensor, is faster; with "row", one
    scale for each row, the result of a row does not depend on the rest of the batch. None means "tensor" if this torch
    has an engine for it, else "row".

    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> x = torch.randn(3, 64)
    >>> bool((quantize(model)(x) - model(x)).abs().max() < 0.05)
    True
    """
    if scales not in (None, "tensor", "row"):
        raise ValueError(f"scales must be tensor, row or None, got {scales!r}")
    if scales == "tensor" and not int8_engine():
        raise ValueError("scales by tensor need fbgemm, which this torch has not: use row")
    by_tensor = scales == "tensor" or (scales is None and int8_engine() is not None)
    return _copied(model, TensorQuantizedLinear if by_tensor else QuantizedLinear, "int8")


def int8_engine() -> str | None:
    """Return the name of torch's int8 engine that rounds and multiplies in one call; None if there is none."""
    known = torch.backends.quantized.supported_engines
    return next((name for name in ("x86", "fbgemm") if name in known), None)


def pack(model: Model) -> Model:
    """Return a float32 copy of a model for inference on the CPU, with weights in the memory layout of oneDNN.

    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> x = torch.randn(3, 64)
    >>> torch.allclose(pack(model)(x), model(x), atol=1e-5)
    True
    """
    return _copied(model, PackedLinear, "packing")


def _copied(model: Model, linear: "Linear", what: str) -> Model:
    devices = {parameter.device.type for parameter in model.parameters()}
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise ValueError(f"{what} is for the CPU, the model is on {', '.join(sorted(devices))}")
    if dtypes - {"torch.float32"}:
        raise ValueError(f"{what} starts from float32, the model has {', '.join(sorted(dtypes))}")
    if not torch.backends.mkldnn.is_available():
        raise ValueError(f"{what} needs oneDNN, and this build of torch has none")
    done, count = copy.deepcopy(model).eval().requires_grad_(False), 0
    for part in list(done.modules()):
        for name, child in list(part.named_children()):
            if isinstance(part, RecurrentDecoder) and child is part.readout:
                continue  # a recurrent decoder uses slices of this weight, and a packed weight cannot be sliced
            if type(child) is nn.Linear:
                setattr(part, name, linear(child.weight, child.bias))
                count += 1
            elif type(child) is HeadProjection:
                setattr(part, name, PreparedProjection(child, linear))
                count += 1
        if hasattr(part, "prepared_output") and hasattr(part, "output_weight"):
            decoder: Any = part
            decoder.prepared_output = linear(decoder.output_weight, decoder.output_bias)
            count += 1
    if not count:
        raise ValueError(
            f"{what} replaces the nn.Linear and HeadProjection inside a model, and {type(model).__name__} holds none: "
            "put a single layer into nn.Sequential"
        )
    return done


class QuantizedLinear(nn.Module):
    """A linear layer x Wᵀ + b in int8: W has a scale for each output, and x is rounded with a scale for each row.

    >>> QuantizedLinear(torch.eye(4), None)(torch.tensor([[1.0, 0.5, 0.25, -1.0]])).round(decimals=2)
    tensor([[ 1.0000,  0.5000,  0.2500, -1.0000]])
    """

    scale: Tensor
    packed: Tensor
    zero: Tensor
    bias: Tensor | None

    def __init__(self, weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # The processor's instruction for int8 products needs one unsigned operand, so `offset` is added to the rounded
        # inputs. Without VNNI instructions, it adds two products in 16 bits. Inputs up to 63 and an offset of 64 avoid
        # an overflow: 2 · 127 · 127 < 2¹⁵.
        self.most, self.offset = (127, 128) if torch.cpu._is_vnni_supported() else (63, 64)
        scale = (weight.detach().abs().amax(1) / 127).clamp(min=_TINY)
        rounded = (weight.detach() / scale.unsqueeze(-1)).round().to(torch.int8)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("zero", torch.zeros(self.out_features, dtype=torch.long), persistent=False)
        self.register_buffer("rounded", rounded, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """Return the rounded weight as a float32 tensor, for code that inspects the weights of a layer."""
        rounded: Any = self.rounded
        return rounded * self.scale.unsqueeze(-1)

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_zeros((*x.shape[:-1], self.out_features))
        step = torch.maximum(rows.amax(-1, keepdim=True), rows.amin(-1, keepdim=True).neg_())
        step = step.clamp_(min=_TINY).mul_(1 / self.most)
        rounded = torch.mul(rows, step.reciprocal()).round_().to(torch.int8).view(torch.uint8)
        rounded = rounded.bitwise_xor_(128) if self.offset == 128 else rounded.add_(self.offset)  # both wrap around
        product = torch.ops.onednn.qlinear_pointwise(
            *(
                rounded,
                1.0,
                self.offset,
                self.packed,
                self.scale,
                self.zero,
                None,
                1.0,
                0,
                torch.float32,
                "none",
                [],
                "",
            )
        )
        product = product.mul_(step) if self.bias is None else torch.addcmul(self.bias, product, step)
        return product.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


class TensorQuantizedLinear(nn.Module):
    """A linear layer x Wᵀ + b in int8: W has a scale for each output, and x is rounded with one scale for all rows.

    >>> TensorQuantizedLinear(torch.eye(4), None)(torch.tensor([[1.0, 0.5, -0.5, -1.0]])).round(decimals=1)
    tensor([[ 1.0000,  0.5000, -0.5000, -1.0000]])
    """

    bias: Tensor | None

    def __init__(self, weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        scale = (weight.detach().abs().amax(1) / 127).clamp(min=_TINY)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)
        zeros = torch.zeros(self.out_features, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its quantized tensors are deprecated
            rounded = torch.quantize_per_channel(weight.detach(), scale.double(), zeros, 0, torch.qint8)
        self.packed = _packed(rounded, self.bias)
        self.narrow = not torch.cpu._is_vnni_supported()

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """Return the rounded weight as a float32 tensor, for code that inspects the weights of a layer."""
        return torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        if x.numel() == 0:
            return x.new_zeros((*x.shape[:-1], self.out_features))
        return torch.ops.quantized.linear_dynamic(x, self.packed, self.narrow)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


def _packed(rounded: Tensor, bias: Tensor | None) -> Any:
    """Return the weight in the layout of the int8 engine; torch's global choice of an engine does not change."""
    settings: Any = torch.backends.quantized
    before = settings.engine
    settings.engine = int8_engine()
    try:
        return torch.ops.quantized.linear_prepack(rounded, bias)
    finally:
        settings.engine = before


class PackedLinear(nn.Module):
    """A linear layer x Wᵀ + b in float32, with W in the memory layout of oneDNN.

    >>> PackedLinear(torch.eye(4), None)(torch.ones(1, 4))
    tensor([[1., 1., 1., 1.]])
    """

    bias: Tensor | None
    weight: Tensor

    def __init__(self, weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        if x.numel() == 0:
            return x.new_zeros((*x.shape[:-1], self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


Linear = Callable[[Tensor, Tensor | None], nn.Module]


class PreparedProjection(nn.Module):
    """A replacement of `HeadProjection` with the methods of `HeadProjection`, made of int8 or packed linear layers."""

    def __init__(self, source: HeadProjection, linear: Linear) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = source.heads, source.kv_heads, source.head_size
        self.sizes = source.sizes
        weights = source.parts()
        biases = (None, None, None) if source.bias is None else source.bias.split(source.rows)
        self.query = linear(weights[0], biases[0])
        self.key, self.value, self.both, self.whole = None, None, None, None
        if weights[1].shape[1] == weights[2].shape[1]:
            self.both = linear(torch.cat(weights[1:]), _joined(biases[1:]))
        else:
            self.key, self.value = linear(weights[1], biases[1]), linear(weights[2], biases[2])
        if source.weight is not None:
            self.whole = linear(source.weight, source.bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b heads n e"]:
        """Return queries, keys and values of self-attention, concatenated along the axis of heads."""
        if self.whole is None:
            raise ValueError(
                f"query, key and value have sizes {self.sizes}: a sequence that attends itself has one size"
            )
        return self._split(self.whole(x))

    def apart(
        self, x: Float[Tensor, "b n d"], counts: tuple[int, ...] | None = None
    ) -> tuple[Float[Tensor, "b heads n e"], ...]:
        """Return queries, keys and values of self-attention as separate tensors, with the numbers of heads `counts`."""
        return self(x).split_with_sizes(counts or (self.heads, self.kv_heads, self.kv_heads), 1)

    def queries(self, x: Float[Tensor, "b q d"]) -> Float[Tensor, "b h q e"]:
        """Return the queries of all heads."""
        return self._split(self.query(x))

    def memories(
        self, key: Float[Tensor, "b k dk"], value: Float[Tensor, "b k dv"]
    ) -> tuple[Float[Tensor, "b g k e"], Float[Tensor, "b g k e"]]:
        """Return the keys and values of all heads."""
        if self.both is None:
            assert self.key is not None
            assert self.value is not None
            return self._split(self.key(key)), self._split(self.value(value))
        keys, values = self._split(self.both(key)).split(self.kv_heads, 1)
        return keys, values if key is value else self._split(self.both(value)).split(self.kv_heads, 1)[1]

    def cross(
        self, query: Float[Tensor, "b q d"], key: Float[Tensor, "b k dk"], value: Float[Tensor, "b k dv"]
    ) -> tuple[Float[Tensor, "b h q e"], Float[Tensor, "b g k e"], Float[Tensor, "b g k e"]]:
        """Return the queries of one input, and the keys and values of another input, for cross-attention."""
        return self.queries(query), *self.memories(key, value)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def _joined(biases: tuple[Tensor | None, ...]) -> Tensor | None:
    known = [bias for bias in biases if bias is not None]
    return torch.cat(known) if known else None
