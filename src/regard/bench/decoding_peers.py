"""Contenders of the decoding benchmark: HF Marian and CTranslate2 with the weights of a Transformer of regard."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.frame import EncoderDecoder
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import SinusoidalPositions

PAD, BEGIN, END = 0, 1, 2
# decode(source, tokens) returns the best hypothesis of each row of `source`, as a list of `tokens` token ids.
Decode = Callable[[Tensor, int], list[list[int]]]


def marian(model: EncoderDecoder, positions: int) -> Any:
    """Return an HF MarianMTModel with the weights, the device and the dtype of `model`; `model` is a post-norm
    Transformer with tied embeddings and sinusoidal positions.
    """
    from transformers import MarianConfig, MarianMTModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    encoder, decoder = model.encoder, model.decoder
    layer = decoder.stack.layers[0]
    if decoder.stack.norm is not None or not isinstance(decoder.input.positions, SinusoidalPositions):
        raise ValueError("Marian is a post-norm Transformer with sinusoidal positions, the model is not")
    vocabulary, size = decoder.output_weight.shape
    heads, hidden, layers = layer.self_attention.heads, layer.feed_forward.hidden_size, len(decoder.stack.layers)
    options: dict[str, Any] = {
        "vocab_size": vocabulary, "d_model": size, "encoder_layers": layers, "decoder_layers": layers,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads, "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": hidden, "activation_function": "relu", "scale_embedding": True, "pad_token_id": PAD,
        "eos_token_id": END, "bos_token_id": BEGIN, "decoder_start_token_id": BEGIN, "forced_eos_token_id": None,
        "max_position_embeddings": positions, "attn_implementation": "sdpa",
    }  # fmt: skip
    peer: Any = MarianMTModel(MarianConfig(**options)).eval()
    with torch.no_grad():
        peer.model.shared.weight.copy_(decoder.output_weight)
        peer.final_logits_bias.zero_()
        table = decoder.input.positions.table(positions)
        for mine, theirs in ((encoder, peer.model.encoder), (decoder, peer.model.decoder)):
            theirs.embed_positions.weight.copy_(table)
            for source, target in zip(mine.stack.layers, theirs.layers, strict=True):
                _layer(source, target)
    weight = decoder.output_weight
    return peer.to(device=weight.device, dtype=weight.dtype)


def _layer(source: Any, target: Any) -> None:
    if hasattr(source, "cross_attention"):
        attentions = [("self_attention", "self_attn"), ("cross_attention", "encoder_attn")]
    else:
        attentions = [("attention", "self_attn")]
    for mine, theirs in attentions:
        _attention(getattr(source, mine), getattr(target, theirs))
        _copy(getattr(source, f"around_{mine}").norm, getattr(target, f"{theirs}_layer_norm"))
    _copy(source.feed_forward.inner, target.fc1)
    _copy(source.feed_forward.outer, target.fc2)
    _copy(source.around_feed_forward.norm, target.final_layer_norm)


def _attention(source: MultiHeadAttention, target: Any) -> None:
    bias = source.projection.bias
    assert bias is not None
    maps = (target.q_proj, target.k_proj, target.v_proj)
    for into, weight, offset in zip(maps, source.projection.parts(), bias.chunk(3), strict=True):
        into.weight.copy_(weight)
        into.bias.copy_(offset)
    _copy(source.output, target.out_proj)


def _copy(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())


def generate(model: Any, width: int) -> Decode:
    """Return a function that decodes with the beam search of HF `generate`."""

    def decode(source: Tensor, tokens: int) -> list[list[int]]:
        outputs = model.generate(
            source,
            attention_mask=torch.ones_like(source),
            num_beams=width,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            length_penalty=1.0,
            early_stopping=False,
        )
        return outputs[:, 1:].tolist()

    return decode


def ctranslate2(model: Any, width: int, precision: str, threads: int) -> Decode:
    """Return a function that decodes with the beam search of CTranslate2, with the weights and on the device of the
    Marian model `model`; its vocabulary has the token ids as words.
    """
    from ctranslate2 import Translator
    from ctranslate2.converters.transformers import BartLoader

    device = model.device.type
    model = copy.deepcopy(model).float().cpu()
    model.config.normalize_before = model.config.normalize_embedding = False
    spec: Any = BartLoader().get_model_spec(model)
    words = [str(number) for number in range(model.config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = spec.config.decoder_start_token = words[BEGIN]
    spec.config.eos_token, spec.config.unk_token = words[END], words[PAD]
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(str(Path(folder)))
        translator = Translator(folder, device=device, compute_type=precision, inter_threads=1, intra_threads=threads)

    def decode(source: Tensor, tokens: int) -> list[list[int]]:
        batch = [[str(number) for number in row] for row in source.tolist()]
        results = translator.translate_batch(
            batch,
            beam_size=width,
            min_decoding_length=tokens,
            max_decoding_length=tokens,
            length_penalty=1.0,
        )
        return [[int(word) for word in result.hypotheses[0]] for result in results]

    return decode
