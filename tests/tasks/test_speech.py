"""Tests of speech recognition: error rates, times of words, settings, and training on sound files."""

import json
import math

import numpy as np
import pytest
import torch
from tiny_runs import one_line, regard

import regard as package
from regard.data.audio.sound_files import wav_bytes
from regard.data.worlds.utterances import utterances
from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure
from regard.tasks.speech.codec import SpeechCodec, words_of
from regard.tasks.speech.log_mel_frames import frames_of, interval
from regard.tasks.speech.material import Example, collate, encode
from regard.tasks.speech.network import build
from regard.tasks.speech.predictor import SpeechPredictor, Transcript
from regard.tasks.speech.scoring import doubted, error_rate, pointing, text_figures, wrong_symbols
from regard.tasks.task import InputError, SettingError

SPEECH = TASKS["speech"]
SMALL = ["model.size=8", "encoder_size=8", "symbols=words"]


def config(*settings: str):
    return configure(SPEECH, "tiny", [], dict(one.split("=", 1) for one in (*SMALL, *settings)))


# Pairs of a reference and a transcript, with the word and character error rates that jiwer 4.0 computes.
JIWER = [
    ("one two three four", "one too three", 0.5, 1 / 3),
    ("a b c", "x a b c d", 2 / 3, 0.8),
    ("seven", "seven", 0.0, 0.0),
    ("six eight nine", "six nine eight nine", 1 / 3, 5 / 14),
]


@pytest.mark.parametrize(("said", "written", "words", "characters"), JIWER)
def test_error_rates_are_those_of_jiwer(said, written, words, characters):
    assert error_rate([(said.split(), written.split())]) == pytest.approx(words)
    assert error_rate([(said, written)]) == pytest.approx(characters)


def test_error_rates_of_several_are_of_all_symbols_together():
    said, written = ["one two three four", "go left", "stop"], ["one two four four", "go", "stop right"]
    assert error_rate([(a.split(), b.split()) for a, b in zip(said, written, strict=True)]) == pytest.approx(3 / 7)
    assert error_rate(list(zip(said, written, strict=True))) == pytest.approx(16 / 29)


@pytest.mark.parametrize(
    ("said", "written", "distance", "wrong"),
    [
        ("abc", "abc", 0, [False] * 3),
        ("abc", "axc", 1, [False, True, False]),
        ("abc", "abxc", 1, [False, False, True, False]),
        ("abc", "ac", 1, [False, False]),
        ("", "ab", 2, [True, True]),
        ("ab", "", 2, []),
    ],
)
def test_which_symbols_are_wrong(said, written, distance, wrong):
    assert wrong_symbols(said, written) == (distance, wrong)


def transcript(text: str, probabilities: tuple[float, ...]) -> Transcript:
    symbols = tuple(text.split())
    return Transcript(text, symbols, (), probabilities, None, np.zeros((8, 4), np.float16), 0.04, 0.0)


@pytest.mark.parametrize(
    ("by", "symbols", "chances", "line"),
    [
        ("words", ("go", "up"), (0.9, 0.6), "go up  (go 0.00–0.08 s 0.90, *up 0.08–0.12 s 0.60*)"),
        (
            "characters",
            tuple("go␣up"),
            (0.9, 0.5, 0.4, 0.8, 0.5),
            "go up  (*go 0.00–0.04 s 0.45*, up 0.08–0.12 s 0.40)",
        ),
    ],
)
def test_a_line_has_the_words_with_seconds_and_probability(by, symbols, chances, line):
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    if by == "characters":
        weights = torch.eye(3)[[0, 0, 1, 2, 2]]
    frames = np.zeros((12, 4), np.float16)
    found = Transcript("go up", symbols, (), chances, weights, frames, 0.04, 0.0, by=by)
    assert found.line == line
    assert [one["word"] for one in found.record()["words"]] == ["go", "up"]


def test_the_least_certain_symbol_is_found_among_the_wrong_ones():
    codec = SpeechCodec.build([("one", "two")], "words", size=9)
    predictor = SpeechPredictor(build(config(), codec.vocabulary.size), codec, config())
    examples = [Example(np.zeros(9, np.float32), ("one", "two", "six"))] * 3
    written = [
        transcript("one two six", (0.1, 0.2, 0.3)),  # this transcript has no errors, so it is not part of the metric
        transcript("one too six", (0.9, 0.2, 0.8)),  # in this transcript the wrong symbol has the smallest probability
        transcript("one too six", (0.1, 0.2, 0.3)),  # in this transcript a correct symbol has the smallest probability
    ]
    found = doubted(predictor, written, examples)
    assert found == {"least_certain_wrong": 0.5, "at_random_wrong": 0.3333, "with_errors": 2}
    figures = text_figures(written, examples)
    assert (figures["wer"], figures["exact"]) == (0.2222, 0.3333)


def test_a_symbol_was_heard_around_its_largest_weight():
    assert interval([0.0, 0.3, 0.5, 0.15, 0.05], 0.04) == pytest.approx((0.04, 0.12, 0.1))


@pytest.mark.parametrize(("by", "count"), [("words", 2), ("characters", 9)])
def test_peaks_are_compared_with_the_times_of_words_or_letters(by, count, monkeypatch):
    item = next(utterances(3, count=1, words=(2, 2)))
    codec = SpeechCodec.build([item.words], by, size=99)
    settings = config(f"symbols={by}")
    predictor = SpeechPredictor(build(settings, codec.vocabulary.size), codec, settings)
    example = Example(item.samples, item.words, item.times, item.letter_times)
    gold = example.gold(codec)
    steps = math.ceil(len(frames_of(item.samples, settings)) / settings.reduction)
    weights = torch.zeros(len(gold), steps)
    for row, (begin, end) in zip(weights, gold, strict=True):
        row[int((begin + end) / 2 / settings.step)] = 1.0
    monkeypatch.setattr(SpeechPredictor, "read", lambda *_: [(torch.zeros(len(gold)), weights)])
    assert pointing(predictor, [example]) == {"within_50ms": 1.0, "symbols": len(gold)}
    assert len(gold) == len(item.words) if by == "words" else len(item.text)
    weights[0] = torch.zeros(steps).index_fill(0, torch.tensor([steps - 1]), 1.0)
    assert pointing(predictor, [example])["within_50ms"] == pytest.approx(1 - 1 / len(gold), abs=1e-4)


def test_a_batch_is_as_one_by_one():
    settings = config()
    items = list(utterances(1, count=3, words=(1, 3)))
    codec = SpeechCodec.build([item.words for item in items], "words", size=99)
    predictor = SpeechPredictor(build(settings, codec.vocabulary.size), codec, settings)
    features = [frames_of(item.samples, settings) for item in items]
    numbers = [codec.numbers(item.words) for item in items]
    for frames, text, (chances, weights) in zip(features, numbers, predictor.read(features, numbers), strict=True):
        [(alone, own)] = predictor.read([frames], [text])
        torch.testing.assert_close(chances, alone)
        torch.testing.assert_close(weights, own)
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(text)))


@pytest.mark.parametrize("attention", ["location", "monotonic", "additive", "scaled_dot", "hard", "none"])
def test_every_attention_has_gradients_in_both_symbols(attention):
    settings = config(f"attention={attention}", "symbols=characters")
    items = list(utterances(1, count=2, words=(1, 2)))
    codec = SpeechCodec.build([item.words for item in items], "characters", size=99)
    network = SPEECH.network(settings, codec)
    records = [encode(codec, Example(item.samples, item.words), settings) for item in items]
    outcome = SPEECH.outcome(network, collate(records, settings), settings, attention != "none")
    (outcome.total / outcome.count).backward()
    assert all(one.grad is not None and bool(one.grad.isfinite().all()) for one in network.encoder.parameters())
    assert int(outcome.count) == sum(len(item.text) + 1 for item in items)


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("attention", ["location", "monotonic", "additive", "scaled_dot", "bilinear", "hard", "none"])
def test_every_attention_learns(attention):
    torch.manual_seed(1)
    settings = config(f"attention={attention}", "dropout=0", "model.size=32", "encoder_size=24")
    items = list(utterances(1, count=6, words=(2, 3)))
    codec = SpeechCodec.build([item.words for item in items], "words", size=99)
    network = SPEECH.network(settings, codec)
    batch = collate([encode(codec, Example(item.samples, item.words), settings) for item in items], settings)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        outcome = SPEECH.outcome(network, batch, settings, False)
        loss = outcome.total / outcome.count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.3  # an untrained model assigns about 1/14 to each of fourteen words: ln 14 is 2.6
    assert min(losses[30:]) < 0.15


def test_the_twin_without_attention_has_as_many_parameters():
    counts = [
        sum(one.numel() for one in build(config(f"attention={name}"), 30).parameters()) for name in ("location", "none")
    ]
    assert counts[1] == pytest.approx(counts[0], rel=0.06)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pyramid=3", "at most 40 ms"),
        ("kernel=4", "must be odd"),
        ("data.words=[3, 2]", "smaller number first"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting, message):
    with pytest.raises(SettingError, match=message):
        config(setting)


def test_words_are_compared_without_case_and_punctuation():
    assert words_of("NORTHANGER Abbey, isn't it?") == ("northanger", "abbey", "isn't", "it")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Return a folder with twelve recordings at 16 kHz, one of them silent, and transcripts of these and of a missing
    one."""
    folder = tmp_path_factory.mktemp("recordings")
    rows = []
    for number, item in enumerate(utterances(4, count=12, words=(1, 2), rate=16_000)):
        (folder / f"{number}.wav").write_bytes(wav_bytes(item.samples * (number != 3), 16_000))
        rows.append(json.dumps({"sound": f"{number}.wav", "text": item.text, "times": item.times}))
    (folder / "transcripts.jsonl").write_text("\n".join([*rows, '{"sound": "gone.wav", "text": "one"}']) + "\n")
    return folder


@pytest.mark.slow
def test_recordings_of_ones_own_train_a_run_that_goes_on(recordings, tmp_path):
    few = ("--preset", "tiny", "--set", "steps=2", "--set", "validate_every=2", "--set", "warmup=1")
    few = (*few, *(word for one in SMALL for word in ("--set", one)), "--data", recordings)
    one_line(regard("train", "speech", *few, "--out", tmp_path / "a"), "transcripts.jsonl:13: no sound 'gone.wav'")
    done = regard("train", "speech", *few, "--set", "skip_faults=true", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "1 transcript without sound" in done.output
    assert "transcripts.jsonl:4" in done.output
    assert "the sound is silent" in done.output
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert 0 <= result["attention"]["within_50ms"] <= 1
    again = regard("train", "--resume", tmp_path / "run", "--set", "steps=3")
    assert again.exit_code == 0, again.output
    evaluated = regard("evaluate", tmp_path / "run", "--data", recordings, "--json")
    assert json.loads(evaluated.stdout)["metrics"]["recordings"] == 11
    refused(tmp_path / "run", recordings)


def refused(run, recordings):
    """Assert that each invalid sound gives an `InputError` and that the valid sounds are transcribed."""
    hour = (recordings / "0.wav").read_bytes()[:40] + (2 * 16_000 * 3600).to_bytes(4, "little")
    given = [recordings / "0.wav", b"", b"nonsense", hour, recordings / "3.wav", recordings / "1.wav"]
    found = package.load(run).answers([{"sound": one} for one in given])
    assert [isinstance(one, InputError) for one in found] == [False, True, True, True, True, False]
    assert "3,600.0 s of sound" in str(found[3])
    assert "the sound is silent" in str(found[4])
    record = found[0].record()
    chances = [one["probability"] for one in record["symbols"]]
    assert record["least_certain"] == chances.index(min(chances))
    assert all(0 <= one["start"] <= one["peak"] <= one["end"] for one in record["symbols"])
    assert found[0].line.count("*") == 2
    columns = found[0].trace().records[0].column_labels
    assert (columns.kind, columns.extra["seconds"]) == ("frames", pytest.approx(0.04))
