"""Tests of undocumented behaviour of torch and transformers on which `regard.watch` relies."""

import inspect
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from regard.look.capture.multihead_modules import open_form


class Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.met = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.met.append(function)
        return function(*args, **(kwargs or {}))


def met(run) -> list:
    with Names() as names:
        run()
    return names.met


def test_a_mode_meets_the_attention_function_under_any_name():
    x = torch.randn(1, 1, 3, 4)
    alias = F.scaled_dot_product_attention
    assert F.scaled_dot_product_attention in met(lambda: alias(x, x, x))


def test_the_multihead_function_is_plain_python_that_hands_itself_over():
    function = F.multi_head_attention_forward
    assert isinstance(function, FunctionType)
    assert "has_torch_function" in function.__code__.co_names
    assert list(inspect.signature(function).parameters)[:5] == [
        "query",
        "key",
        "value",
        "embed_dim_to_check",
        "num_heads",
    ]
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    assert function in met(lambda: layer(x, x, x))
    assert function not in met(
        lambda: open_form(function)(
            x,
            x,
            x,
            8,
            2,
            layer.in_proj_weight,
            layer.in_proj_bias,
            None,
            None,
            False,
            0.0,
            layer.out_proj.weight,
            layer.out_proj.bias,
        )
    )


def test_a_mode_keeps_the_encoder_from_its_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    with torch.no_grad():
        names = met(lambda: layer(torch.randn(1, 3, 8)))
    assert F.multi_head_attention_forward in names
    assert torch._transformer_encoder_layer_fwd not in names


def test_the_encoder_has_what_tells_its_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    assert encoder.use_nested_tensor is True
    assert encoder.mask_check is True
    assert list(inspect.signature(encoder.forward).parameters) == ["src", "mask", "src_key_padding_mask", "is_causal"]


def test_flex_attention_reaches_its_operator_through_a_mode():
    import warnings

    from torch._higher_order_ops.flex_attention import flex_attention as operator
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(1, 1, 16, 16)
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert operator in met(lambda: flex_attention(x, x, x))
    names = list(inspect.signature(type(operator).__call__).parameters)
    assert names[1:7] == ["query", "key", "value", "score_mod", "block_mask", "scale"]
    assert {"score_mod_other_buffers", "mask_mod_other_buffers"} <= set(names)


def test_a_compiled_model_names_what_it_wraps():
    assert [name for name, _ in torch.compile(nn.Sequential(nn.Linear(2, 2))).named_modules()][1] == "_orig_mod"


def test_reading_a_transposed_form_is_met_as_a_function():
    x = torch.randn(2, 3)
    reads = {vars(torch._C.TensorBase)[name].__get__ for name in ("mT", "T")}
    assert {function for function in met(lambda: (x.mT, x.T)) if function in reads} == reads


def test_transformers_looks_its_attention_up_in_a_table_that_can_be_changed():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    before = dict(TABLE._local_mapping)
    original = TABLE["sdpa"]
    TABLE["sdpa"] = print
    try:
        assert TABLE.get_interface("sdpa", original) is print
    finally:
        del TABLE["sdpa"]
    assert TABLE["sdpa"] is original
    assert TABLE._local_mapping == before
    names = list(inspect.signature(TABLE["flash_attention_2"]).parameters)
    assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert {"scaling", "sliding_window", "softcap", "is_causal", "s_aux", "dropout"} <= set(names)
