"""Models that work with `regard.watch`: each is built small with random weights, watched, and compared.

    python tools/works_with.py            prints the table in Markdown

The weights that `regard.watch` captures are compared with the weights that the model itself returns with eager
attention.
"""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.look.trace import Trace
from regard.look.watch import watch

Run = Callable[[nn.Module], Any]
Truth = dict[str, list[Tensor]]  # expected weights (b, h, q, k) of each call, by a pattern of layer names


@dataclass(frozen=True)
class Case:
    """A model to watch; `build` returns the model, a function that runs it, and the expected attention weights."""

    family: str
    implementation: str
    build: Callable[[], tuple[nn.Module, Run, Truth]]


@dataclass(frozen=True)
class Outcome:
    """The result of watching a model: the number of captured calls, the largest error of the weights and of the output,
    and the largest value of `Record.check`."""

    calls: int
    expected: int
    weights: float
    output: float
    check: float | None
    trace: Trace


def outcome(case: Case, *, compiling: bool = True) -> Outcome:
    """Watch the model of a case, and compare the captured weights and the output with the expected weights and output.
    Without `compiling`, the run that is not watched is not compiled, which is faster.
    """
    torch.manual_seed(5)
    model, run, truth = case.build()
    with torch.no_grad():
        with torch.compiler.set_stance("default" if compiling else "force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = _tensor(run(model))
        with watch(model) as trace:
            watched = _tensor(run(model))
    worst = 0.0
    for pattern, expected in truth.items():
        records = trace.select(pattern).records
        if len(records) != len(expected):
            worst = math.inf
        for record, weights in zip(records, expected, strict=False):
            for item in range(record.batch):
                worst = max(worst, difference(record.weights(batch=item), weights[item]))
    checks = [record.check(batch=item) for record in trace for item in range(record.batch)]
    known = [check for check in checks if check is not None]
    return Outcome(
        len(trace),
        sum(map(len, truth.values())),
        worst,
        difference(watched, plain),
        max(known) if len(known) == len(checks) and known else None,
        trace,
    )


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinite if the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    return float((actual.float() - expected.float()).abs().max())


def _tensor(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state", "sample", "sequences"):
        if hasattr(output, name):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple) else output


# Models of Hugging Face transformers

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
BATCH, LENGTH, VOCABULARY = 2, 11, 61


def _ids(length: int = LENGTH) -> Tensor:
    return torch.randint(5, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(3))


def _padding(length: int = LENGTH, *, left: bool = False) -> Tensor:
    mask = torch.ones(BATCH, length, dtype=torch.long)
    if left:
        mask[1, :3] = 0
    else:
        mask[1, -3:] = 0
    return mask


def _hugging(
    name: str,
    config: dict[str, Any],
    inputs: Callable[[], dict[str, Tensor]],
    patterns: dict[str, str],
    implementation: str,
    *,
    compiled: bool = False,
) -> Callable[[], tuple[nn.Module, Run, Truth]]:
    """Return a function that builds a model of transformers; the expected weights come from eager attention with
    `output_attentions`."""

    def build() -> tuple[nn.Module, Run, Truth]:
        import transformers

        family = getattr(transformers, name)
        settings = family.config_class(**config)
        if implementation == KERNEL:
            register_kernel()
        settings._attn_implementation = "eager"
        plain = family(settings).eval()
        spread_out(plain)
        other = copy.deepcopy(settings)
        other._attn_implementation = implementation
        model = family(other).eval()
        model.load_state_dict(plain.state_dict())
        arguments = inputs()
        with torch.no_grad():
            output = plain(**arguments, output_attentions=True)
        truth = {pattern: list(getattr(output, field)) for pattern, field in patterns.items()}
        if implementation == KERNEL and "attention_mask" in arguments:  # the weights of padding queries are 0
            rows = arguments["attention_mask"].bool()[:, None, :, None]
            truth = {pattern: [weights * rows for weights in tensors] for pattern, tensors in truth.items()}
        return (torch.compile(model) if compiled else model), (lambda net: net(**arguments)), truth

    return build


def spread_out(model: nn.Module) -> None:
    """Set the parameters to larger values than the initial ones, so that attention is far from uniform and errors are
    visible."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[-1]))


KERNEL = "regard_opaque"


def register_kernel() -> None:
    """Register an opaque attention kernel in transformers, which calls it like flash kernels."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(KERNEL, _kernel_attention)
    AttentionMaskInterface.register(KERNEL, flash_attention_mask)


def _kernel_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    causal = options.get("is_causal")
    causal = module.is_causal if causal is None else causal
    none = torch.zeros(0)
    sinks, mask = options.get("s_aux"), attention_mask
    output = _opaque_kernel(
        query,
        key,
        value,
        none if mask is None else mask,
        none if sinks is None else sinks.clone(),
        float(options["scaling"]),
        options.get("softcap") or 0.0,
        bool(causal) and query.shape[2] > 1,
        options.get("sliding_window") or 0,
    )
    return output.transpose(1, 2).contiguous(), None


@torch.library.custom_op("regard_tools::opaque_attention", mutates_args=())
def _opaque_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float,
    causal: bool,
    reach: int,
) -> Tensor:
    group, queries, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    place = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]  # position of a key relative to the query
    allowed = (place <= 0) if causal else torch.ones(queries, keys, dtype=torch.bool)
    if reach:
        allowed = allowed & (place.abs() < reach)
    allowed = allowed[None, None]
    if mask.numel():
        real = mask.bool()
        allowed = allowed & real[:, None, None, :]
        if queries == keys:
            allowed = allowed & real[:, None, :, None]
    scores = query @ key.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -math.inf)
    if sinks.numel():
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1).nan_to_num(0)[..., :keys] @ value


BERT = ("BertModel", {**SMALL, "vocab_size": VOCABULARY}, lambda: {"input_ids": _ids(), "attention_mask": _padding()})
GPT2 = (
    "GPT2LMHeadModel",
    {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY},
    lambda: {"input_ids": _ids(), "attention_mask": _padding()},
)
LLAMA = (
    "LlamaForCausalLM",
    {**SMALL, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
    lambda: {"input_ids": _ids()},
)
LLAMA_PADDED = (LLAMA[0], LLAMA[1], lambda: {"input_ids": _ids(), "attention_mask": _padding()})
MISTRAL = (
    "MistralForCausalLM",
    {**SMALL, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "sliding_window": 4},
    lambda: {"input_ids": _ids()},
)
GEMMA2 = (
    "Gemma2ForCausalLM",
    {**SMALL, "head_dim": 8, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "sliding_window": 4},
    lambda: {"input_ids": _ids()},
)
GPT_OSS = (
    "GptOssForCausalLM",
    {
        **{**SMALL, "intermediate_size": 48},
        **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "num_local_experts": 2},
        **{"num_experts_per_tok": 1, "sliding_window": 4, "max_position_embeddings": 64},
    },
    lambda: {"input_ids": _ids()},
)
T5 = (
    "T5Model",
    {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY},
    lambda: {"input_ids": _ids(), "attention_mask": _padding(), "decoder_input_ids": _ids(7)},
)
VIT = (
    "ViTModel",
    {**SMALL, "image_size": 12, "patch_size": 4},
    lambda: {"pixel_values": torch.rand(BATCH, 3, 12, 12, generator=torch.Generator().manual_seed(1))},
)
WHISPER = (
    "WhisperModel",
    {
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "num_mel_bins": 8},
        **{"max_source_positions": 13, "max_target_positions": 16, "vocab_size": VOCABULARY, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    },
    lambda: {
        "input_features": torch.rand(BATCH, 8, 26, generator=torch.Generator().manual_seed(1)),
        "decoder_input_ids": _ids(7),
    },
)
MARIAN = (
    "MarianModel",
    {
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "vocab_size": VOCABULARY},
        **{"pad_token_id": 0, "max_position_embeddings": 64, "decoder_start_token_id": 1},
    },
    lambda: {"input_ids": _ids(), "attention_mask": _padding(), "decoder_input_ids": _ids(7)},
)
CLIP = (
    "CLIPTextModel",
    {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2},
    lambda: {"input_ids": _ids()},
)
ONE = {"*": "attentions"}
T5_PARTS = {
    "encoder.*SelfAttention": "encoder_attentions",
    "decoder.*SelfAttention": "decoder_attentions",
    "decoder.*EncDecAttention": "cross_attentions",
}
PARTS = {
    "encoder.*self_attn": "encoder_attentions",
    "decoder.*self_attn": "decoder_attentions",
    "decoder.*encoder_attn": "cross_attentions",
}


# Models of torch without other libraries


class Lookers:
    """Records the inputs of every nn.MultiheadAttention and computes the weights with a copy of the layer."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: Truth = {}
        self._handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention)
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            copied = copy.deepcopy(module)
            copied._forward_pre_hooks.clear()
            options = {**kwargs, "need_weights": True, "average_attn_weights": False, "is_causal": False}
            self.weights.setdefault(name, []).append(copied(*args, **options)[1])

        return hear

    def close(self) -> Truth:
        for handle in self._handles:
            handle.remove()
        return self.weights


def _of_torch(make: Callable[[], tuple[nn.Module, Run]], *, compiled: bool = False):  # type: ignore[no-untyped-def]
    def build() -> tuple[nn.Module, Run, Truth]:
        model, run = make()
        spread_out(model)
        model.eval()
        ears = Lookers(model)
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            run(model)
        torch.backends.mha.set_fastpath_enabled(True)
        return (torch.compile(model) if compiled else model), run, ears.close()

    return build


def _states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def multihead(need_weights: bool) -> Callable[[], tuple[nn.Module, Run]]:
    """Return a function that builds one layer. With and without `need_weights`, torch computes attention by different
    functions."""

    def make() -> tuple[nn.Module, Run]:
        x, memory = _states(2, 7, 32), _states(2, 5, 32)
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        return nn.MultiheadAttention(32, 4, batch_first=True), lambda net: net(
            x, memory, memory, key_padding_mask=padding, need_weights=need_weights
        )

    return make


def encoder() -> tuple[nn.Module, Run]:
    """Return an encoder and a function that calls it on padded sequences; in eval mode, torch uses its fast path on
    nested tensors.
    """
    layer = nn.TransformerEncoderLayer(32, 4, 37, batch_first=True)
    x, padding = _states(2, 7, 32), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    return nn.TransformerEncoder(layer, 2), lambda net: net(x, src_key_padding_mask=padding)


def unpadded_encoder() -> tuple[nn.Module, Run]:
    """Return an `nn.TransformerEncoder` and a function that calls it on sequences without padding."""
    model, _ = encoder()
    x = _states(2, 7, 32)
    return model, lambda net: net(x)


def transformer() -> tuple[nn.Module, Run]:
    """Return an `nn.Transformer`, and a function that calls it with a causal mask in the decoder."""
    source, target = _states(2, 7, 32), _states(2, 5, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    model = nn.Transformer(32, 4, 2, 2, 37, batch_first=True)
    return model, lambda net: net(source, target, tgt_mask=mask, tgt_is_causal=True)


class Written(nn.Module):
    """softmax(QKᵀ/√d) V in torch operations, in one of several common implementations."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.way = way
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in self.maps)
        scores = query @ key.transpose(-2, -1) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        if self.way.startswith("flex"):
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            slopes = torch.arange(1.0, 5.0) / 8
            block = create_block_mask(lambda b, h, q, k: q >= k, None, None, x.shape[1], x.shape[1], device="cpu")
            distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
            self.weights = (scores - slopes[:, None, None] * distance).softmax(-1).detach()
            call = torch.compile(flex_attention) if self.way == "flex compiled" else flex_attention
            output = call(query, key, value, lambda s, b, h, q, k: s - (h + 1) / 8 * (q - k), block)
            assert isinstance(output, Tensor)
            return output.transpose(1, 2).flatten(-2)
        weights = scores.softmax(-1)
        self.weights = weights.detach()
        if self.way == "einsum":
            return torch.einsum("b h i j, b h j d -> b i h d", weights, value).flatten(-2)
        return (F.dropout(weights, 0.1, self.training) @ value).transpose(1, 2).flatten(-2)


def _written(way: str, *, compiled: bool = False):  # type: ignore[no-untyped-def]
    def build() -> tuple[nn.Module, Run, Truth]:
        model, x = Written(way).eval(), _states(2, 7, 32)
        spread_out(model)
        with torch.no_grad(), warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            model(x)
        assert model.weights is not None
        return (torch.compile(model) if compiled else model), (lambda net: net(x)), {"": [model.weights]}

    return build


class Bahdanau(nn.Module):
    """A recurrent decoder with additive attention, one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.score = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.cell = nn.GRUCell(16, 16)
        self.weights: list[Tensor] = []

    def forward(self, memory: Tensor) -> Tensor:
        self.weights = []
        state = torch.zeros(memory.shape[0], 16)
        for _ in range(3):
            scores = self.score(torch.tanh(self.query(state)[:, None] + self.key(memory))).squeeze(-1)
            weights = torch.softmax(scores, -1)
            self.weights.append(weights.detach()[:, None, None])
            state = self.cell(torch.bmm(weights.unsqueeze(1), memory).squeeze(1), state)
        return state


def bahdanau() -> tuple[nn.Module, Run, Truth]:
    """Return a recurrent decoder, a function that calls it, and the expected attention weights, one row per step."""
    model, memory = Bahdanau().eval(), _states(2, 5, 16)
    spread_out(model)
    with torch.no_grad():
        model(memory)
    return model, (lambda net: net(memory)), {"": model.weights}


# Models of other libraries


def x_transformers(flash: bool) -> Callable[[], tuple[nn.Module, Run, Truth]]:
    """Return a function that builds a decoder of x-transformers."""

    def build() -> tuple[nn.Module, Run, Truth]:
        from x_transformers import Decoder, TransformerWrapper

        def make(fused: bool) -> nn.Module:
            layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=fused, rotary_pos_emb=True)
            return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers).eval()

        plain, model = make(False), make(flash)
        spread_out(plain)
        model.load_state_dict(plain.state_dict())
        with torch.no_grad():
            _, intermediates = plain(_ids(), return_intermediates=True)
        truth = [part.post_softmax_attn for part in intermediates.attn_intermediates]
        return model, (lambda net: net(_ids())), {"*": truth}

    return build


def diffusers_unet(plain: bool) -> Callable[[], tuple[nn.Module, Run, Truth]]:
    """Return a function that builds a small UNet of diffusers with cross-attention to text."""

    def build() -> tuple[nn.Module, Run, Truth]:
        from diffusers import UNet2DConditionModel
        from diffusers.models.attention_processor import Attention, AttnProcessor

        model = UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(16, 32),
            norm_num_groups=8,
            cross_attention_dim=24,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ).eval()
        sample, text = _states(2, 4, 8, 8), _states(2, 5, 24)
        fused, truth = model.attn_processors, {}
        model.set_attn_processor(AttnProcessor())

        def hear(name: str, module: Attention) -> Callable[..., Tensor]:
            original = module.get_attention_scores

            def scores(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
                output = original(query, key, mask)
                truth.setdefault(name, []).append(output.detach().unflatten(0, (-1, module.heads)))
                return output

            return scores

        layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
        for name, module in layers.items():
            module.get_attention_scores = hear(name, module)
        with torch.no_grad():
            model(sample, 3, text)
        for module in layers.values():
            del module.get_attention_scores
        if not plain:
            model.set_attn_processor(fused)
        return model, (lambda net: net(sample, 3, text)), truth

    return build


def of_regard(score: str) -> Callable[[], tuple[nn.Module, Run, Truth]]:
    """Return a function that builds a multi-head layer of regard."""

    def build() -> tuple[nn.Module, Run, Truth]:
        from regard.core.masks import causal
        from regard.core.requests import full
        from regard.nn.multihead import MultiHeadAttention

        layer, x = MultiHeadAttention(32, 4, kv_heads=2, score=score).eval(), _states(2, 7, 32)
        spread_out(layer)
        with torch.no_grad():
            weights = layer(x, mask=causal(), weights=full()).weights
        assert isinstance(weights, Tensor)
        return layer, (lambda net: net(x, mask=causal()).output), {"": [weights]}

    return build


CASES = [
    Case("BERT", "sdpa", _hugging(*BERT, ONE, "sdpa")),
    Case("BERT", "eager", _hugging(*BERT, ONE, "eager")),
    Case("BERT", "flex", _hugging(*BERT, ONE, "flex_attention")),
    Case("BERT", "sdpa, compiled", _hugging(*BERT, ONE, "sdpa", compiled=True)),
    Case("GPT-2", "sdpa", _hugging(*GPT2, ONE, "sdpa")),
    Case("GPT-2", "eager", _hugging(*GPT2, ONE, "eager")),
    Case("Llama, grouped heads", "sdpa", _hugging(*LLAMA, ONE, "sdpa")),
    Case("Llama, grouped heads, padding", "sdpa", _hugging(*LLAMA_PADDED, ONE, "sdpa")),
    Case("Llama, grouped heads", "eager", _hugging(*LLAMA, ONE, "eager")),
    Case("Llama, grouped heads", "flex", _hugging(*LLAMA, ONE, "flex_attention")),
    Case("Llama, grouped heads", "opaque kernel", _hugging(*LLAMA, ONE, KERNEL)),
    Case("Llama, grouped heads, padding", "opaque kernel", _hugging(*LLAMA_PADDED, ONE, KERNEL)),
    Case("Mistral, sliding window", "sdpa", _hugging(*MISTRAL, ONE, "sdpa")),
    Case("Gemma 2, softcap", "eager", _hugging(*GEMMA2, ONE, "eager")),
    Case("Gemma 2, softcap", "flex", _hugging(*GEMMA2, ONE, "flex_attention")),
    Case("gpt-oss, sinks, window", "eager", _hugging(*GPT_OSS, ONE, "eager")),
    Case("gpt-oss, sinks, window", "opaque kernel", _hugging(*GPT_OSS, ONE, KERNEL)),
    Case("Mistral, sliding window", "opaque kernel", _hugging(*MISTRAL, ONE, KERNEL)),
    Case("Gemma 2, softcap", "opaque kernel", _hugging(*GEMMA2, ONE, KERNEL)),
    Case("T5, position bias", "sdpa", _hugging(*T5, T5_PARTS, "sdpa")),
    Case("T5, position bias", "eager", _hugging(*T5, T5_PARTS, "eager")),
    Case("ViT", "sdpa", _hugging(*VIT, ONE, "sdpa")),
    Case("ViT", "eager", _hugging(*VIT, ONE, "eager")),
    Case("CLIP text", "sdpa", _hugging(*CLIP, ONE, "sdpa")),
    Case("Whisper", "sdpa", _hugging(*WHISPER, PARTS, "sdpa")),
    Case("Whisper", "eager", _hugging(*WHISPER, PARTS, "eager")),
    Case("Marian", "sdpa", _hugging(*MARIAN, PARTS, "sdpa")),
    Case("Marian", "eager", _hugging(*MARIAN, PARTS, "eager")),
    Case("nn.MultiheadAttention", "weights not asked", _of_torch(multihead(False))),
    Case("nn.MultiheadAttention", "weights asked", _of_torch(multihead(True))),
    Case("nn.TransformerEncoder", "eval fast path, padding", _of_torch(encoder)),
    Case("nn.TransformerEncoder", "compiled", _of_torch(unpadded_encoder, compiled=True)),
    Case("nn.Transformer", "causal", _of_torch(transformer)),
    Case("by hand", "matmul", _written("matmul")),
    Case("by hand", "einsum", _written("einsum")),
    Case("by hand", "matmul, compiled", _written("matmul", compiled=True)),
    Case("FlexAttention, ALiBi", "eager", _written("flex")),
    Case("FlexAttention, ALiBi", "compiled", _written("flex compiled")),
    Case("recurrent decoder, additive", "step by step", bahdanau),
    Case("x-transformers", "plain", x_transformers(False)),
    Case("x-transformers", "flash (sdpa)", x_transformers(True)),
    Case("diffusers UNet", "sdpa", diffusers_unet(False)),
    Case("diffusers UNet", "plain", diffusers_unet(True)),
    Case("regard, scaled dot", "fused", of_regard("scaled_dot")),
    Case("regard, additive", "fused", of_regard("additive")),
    Case("regard, cosine", "fused", of_regard("cosine")),
]


def table() -> str:
    """Return the outcome of every case, in Markdown."""
    lines = [
        "| model | attention | calls seen | error of weights | weights · value against output | observer effect |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        result = outcome(case)
        check = "–" if result.check is None else f"{result.check:.0e}"
        lines.append(
            f"| {case.family} | {case.implementation} | {result.calls} of {result.expected} | {result.weights:.0e} "
            f"| {check} | {result.output:.0e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
