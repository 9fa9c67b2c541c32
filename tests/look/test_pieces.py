"""Tests of the readable text of sub-word pieces, for every kind of tokenizer."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from regard.data.text.bpe import train_bpe
from regard.look.labels import as_labels
from regard.look.readable_tokens import readable


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["The", "Ġqu", "ick", ",", "Ġfox"], ["The", "qu", "·ick", ",", "fox"]),
        (["æ±¤å§Ĩ"], ["汤姆"]),
        (["æ±¤", "å§Ĩ"], ["汤", "姆"]),
        (["æ", "±", "¤"], ["汤⟨1/3⟩", "汤⟨2/3⟩", "汤⟨3/3⟩"]),
        (["Ġæ±", "¤å§Ĩ"], ["汤⟨1/2⟩", "汤⟨2/2⟩姆"]),
        (["Ġ", "Ċ", "Ġa"], [" ", "\n", "a"]),
        (["▁Tom", "▁chas", "es"], ["Tom", "chas", "·es"]),
        (["▁", "<0xE6>", "<0xB1>", "<0xA4>"], [" ", "汤⟨1/3⟩", "汤⟨2/3⟩", "汤⟨3/3⟩"]),
        (["jump", "##ing", "汤", "##姆", "#"], ["jump", "·ing", "汤", "姆", "#"]),
        (["café", "naïve"], ["café", "naïve"]),
        (["<0xFF>", "▁a"], ["<FF>", "a"]),
        (["2", "0", "▁24"], ["2", "·0", "24"]),
    ],
)
def test_a_piece_is_shown_as_its_text(pieces, shown):
    assert readable(pieces) == shown


def test_special_tokens_stay_as_they_are():
    assert readable(["<s>", "Ġthe", "</s>"], [True, False, True]) == ["<s>", "the", "</s>"]
    assert readable(["<｜end▁of▁text｜>", "Ġthe"], byte_level=True) == ["<｜end▁of▁text｜>", "the"]


TEXT = "The quickest 汤姆 jumping"


def byte_level() -> Tokenizer:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<s>"],
    )
    model.train_from_iterator(["The quick jump"] * 4, trainer)
    return model


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "the", "quick", "##est", "汤", "姆", "jump", "##ing"]
    model = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    return model


def sentence_piece() -> Tokenizer:
    pieces = ["▁The", "▁quick", "est", "▁", "汤", "<0xE5>", "<0xA7>", "<0x86>", "▁jump", "ing", "<unk>"]
    letters = sorted({c for piece in pieces if not piece.startswith("<") for c in piece})
    scores = [(piece, -1.0) for piece in pieces] + [(letter, -9.0) for letter in letters if letter not in pieces]
    scores += [(f"<0x{n:02X}>", -9.0) for n in range(256) if f"<0x{n:02X}>" not in pieces]
    model = Tokenizer(models.Unigram(scores, unk_id=10, byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return model


CHINESE = [f"{c}⟨{n}/3⟩" for c in "汤姆" for n in (1, 2, 3)]
KINDS = {
    "byte level": (byte_level, ["The", "quick", "·e", "·s", "·t", " ", *CHINESE, "jump", "·i", "·n", "·g"]),
    "word piece": (word_piece, ["the", "quick", "·est", "汤", "姆", "jump", "·ing"]),
    "sentence piece": (
        sentence_piece,
        ["The", "quick", "·est", " ", "汤", "姆⟨1/3⟩", "姆⟨2/3⟩", "姆⟨3/3⟩", "jump", "·ing"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_a_tokenizer_are_text(kind):
    make, shown = KINDS[kind]
    model = make()
    assert list(as_labels((model, model.encode(TEXT).ids)).items) == shown
    assert list(as_labels(model.encode(TEXT)).items) == shown


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_a_tokenizer_of_transformers_are_text(as_installed, kind):
    from transformers import PreTrainedTokenizerFast

    make, shown = KINDS[kind]
    coder = PreTrainedTokenizerFast(tokenizer_object=make())
    encoding = coder([TEXT], return_tensors="pt")
    assert list(as_labels((coder, encoding["input_ids"])).items) == shown
    assert list(as_labels((coder, encoding)).items) == shown
    assert list(as_labels(encoding).items) == shown


def test_offsets_show_the_very_characters_of_the_text():
    model = word_piece()
    found = as_labels(("The QUICKEST 汤姆 xyz", model.encode("The QUICKEST 汤姆 xyz")))
    # Labels are taken from the original text, so none of them is [UNK].
    assert found.items == ("The", "QUICK", "·EST", "汤", "姆", "xyz")
    byte = byte_level()
    assert list(as_labels((TEXT, byte.encode(TEXT))).items) == KINDS["byte level"][1]


def test_our_own_sub_words_are_text():
    subwords = train_bpe(["Tom chases Jerry"] * 4, size=300)
    ids = subwords.encode("Tom chases 汤")
    assert as_labels((subwords, ids)).items == ("Tom", "chases", " ", "汤⟨1/3⟩", "汤⟨2/3⟩", "汤⟨3/3⟩")
    assert as_labels((subwords, torch.tensor([[subwords.bos, *ids, subwords.eos]]))).items[0] == "<bos>"
