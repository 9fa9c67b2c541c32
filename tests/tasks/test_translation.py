"""Tests of translation from configuration to prediction, with tiny runs on generated sentences and on files."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import forked
from regard.cli import app
from regard.tasks.config_overrides import changed, configure, parsed
from regard.tasks.task import SettingError
from regard.tasks.translation.config import AttentionName, TranslationConfig
from regard.tasks.translation.network import build
from regard.tasks.translation.presets import PRESETS, tiny
from regard.tasks.translation.task import TRANSLATION
from time_limits import HANG_SECONDS

SMALL = (
    *("--set", "steps=6", "--set", "validate_every=3", "--set", "data.train=300", "--set", "data.valid=12"),
    *("--set", "data.test=12", "--set", "longer=3", "--set", "model.size=16", "--set", "embedding=12"),
)


def regard(*arguments: str, cwd: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100"}
    return forked.run([sys.executable, "-m", "regard", *arguments], cwd=cwd, env=environment, input=stdin or "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of a few steps on generated sentence pairs; return its directory."""
    folder = tmp_path_factory.mktemp("runs")
    done = regard("train", "translation", "--preset", "tiny", *SMALL, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder / "run"


@pytest.mark.process
def test_a_run_holds_everything(trained):
    names = {path.name for path in trained.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl", "result.json", "README.md"}
    result = json.loads((trained / "result.json").read_text())
    assert result["task"] == "translation"
    assert set(result["metrics"]) >= {"bleu", "chrf", "exact", "signature", "by_length"}
    assert 0.0 <= result["attention"]["aer"] <= 1.0
    assert set(result["faithfulness"]) == {"attended", "random"}
    assert result["parameters"] > 0
    assert {"seconds", "command", "versions", "device", "seed", "data"} <= set(result)


@pytest.mark.process
def test_evaluating_again_gives_the_same_figures(trained):
    kept = json.loads((trained / "result.json").read_text())
    done = regard("evaluate", str(trained), "--json", cwd=trained.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["metrics"] == kept["metrics"]
    assert found["attention"] == kept["attention"]


@pytest.mark.process
def test_predictions_from_arguments_and_from_a_pipe_are_the_same(trained, tmp_path):
    texts = ["Tom chases Jerry", "the cat sleeps ."]
    given = regard("predict", str(trained), *texts, cwd=tmp_path)
    piped = regard("predict", str(trained), cwd=tmp_path, stdin="\n".join(texts) + "\n")
    assert given.returncode == 0, given.stderr
    assert given.stdout == piped.stdout
    assert len(given.stdout.splitlines()) == 2


@pytest.mark.process
def test_json_has_the_alignment_and_weights_that_add_up(trained, tmp_path):
    done = regard("predict", str(trained), "Tom chases Jerry", "--json", "--beam", "3", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["source"] == "Tom chases Jerry"
    assert found["source_words"] == found["source_pieces"] == ["Tom", "chases", "Jerry"]
    assert found["target_words"] == found["target_pieces"]
    assert found["alignment"] == found["piece_alignment"]
    assert "".join(found["target_pieces"]) == found["translation"]
    for row in found["weights"]:
        assert sum(row) == pytest.approx(1.0, abs=1e-3)
    for source, target in found["alignment"]:
        row = found["weights"][target]
        assert row[source] == max(row)


@pytest.mark.process
def test_a_page_is_written(trained, tmp_path):
    done = regard("predict", str(trained), "Tom chases Jerry", "--look", "out/page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out/page.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")


@pytest.mark.process
def test_nothing_and_nonsense_as_input(trained, tmp_path):
    done = regard("predict", str(trained), "", "Tom chases Jerry", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    empty, full = map(json.loads, done.stdout.splitlines())
    assert empty["translation"] == ""
    assert full["translation"]
    bad = subprocess.run(
        [sys.executable, "-m", "regard", "predict", str(trained)],
        env={**os.environ, "PYTHONUTF8": "1"},
        input=b"Tom\n\xff\xfe\n",
        capture_output=True,
        timeout=HANG_SECONDS,
    )
    assert bad.returncode == 1
    assert b"line 2: not UTF-8" in bad.stderr
    assert bad.stdout.count(b"\n") == 2


def test_a_command_that_failed_leaves_nothing_behind(tmp_path, monkeypatch, as_installed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\n")
    done = CliRunner().invoke(app, ["train", "translation", "--data", "a.en", "--data", "a.de", "--out", "run"])
    assert done.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_an_unknown_name_is_copied_from_where_the_model_looks():
    from regard.data.text.vocabulary import Vocabulary
    from regard.tasks.translation.codec import WordCoder

    coder = WordCoder(Vocabulary(("Tom", "chases")), Vocabulary(("汤姆", "追逐")))
    source = coder.read("Tom chases Zork")
    weights = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9]])
    numbers = (*coder.goal.encode(("汤姆", "追逐")), coder.goal.unknown)
    assert coder.write(numbers, source, weights) == "汤姆追逐Zork"


@pytest.mark.process
def test_files_are_read_split_and_learned(tmp_path):
    """Training on text files learns sub-words and splits the pairs by source sentence; `regard evaluate` on the files
    evaluates all pairs."""
    pairs = [(f"the cat number {n} sleeps", f"die Katze Nummer {n} schläft") for n in range(120)]
    for side, suffix in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in pairs)
        (tmp_path / f"all.{suffix}.gz").write_bytes(gzip.compress(text.encode()))
    data = ("--data", "all.en.gz", "--data", "all.de.gz")
    small = ("--set", "steps=4", "--set", "validate_every=2", "--set", "data.valid=8", "--set", "data.test=8")
    more = ("--set", "vocabulary=300", "--set", "model.size=16", "--set", "model=transformer", "--set", "heads=2")
    done = regard("train", "translation", *data, *small, *more, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads((tmp_path / "run/result.json").read_text())["metrics"]["tokenize"] == "13a"
    again = regard("evaluate", "run", *data, "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert sum(part["sentences"] for part in json.loads(again.stdout)["metrics"]["by_length"]) == 120
    spoken = regard("predict", "run", "a name nobody knows: Žluťoučký 🐭", cwd=tmp_path)
    assert spoken.returncode == 0, spoken.stderr


@pytest.mark.process
def test_a_killed_run_goes_on_to_the_same_end(tmp_path):
    arguments = ("train", "translation", "--preset", "tiny", *SMALL, "--set", "steps=16", "--set", "validate_every=4")
    whole = regard(*arguments, "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    process = forked.Process([sys.executable, "-m", "regard", *arguments, "--out", "cut"], cwd=tmp_path)
    while not list((tmp_path / "cut/checkpoints").glob("step-*")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = regard(*arguments, "--out", "cut", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    found, true = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert found.keys() == true.keys()
    assert all(torch.equal(found[name], true[name]) for name in true)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("train", "cooking"), "no task is called 'cooking'"),
        (("train", "translation", "--preset", "huge"), "no preset is called 'huge'"),
        (("train", "translation", "--set", "attention=magic"), "model.attention"),
        (("train", "translation", "--set", "sise=3"), "no setting is called 'sise'"),
        (("train", "translation", "--set", "seed"), "expected key=value"),
        (("train", "translation", "--data", "nowhere.tsv"), "no such file: nowhere.tsv"),
        (("train", "translation", "--resume", "--out", "nowhere"), "there is no run to resume in nowhere"),
        (("evaluate", "nowhere"), "nowhere is no run"),
        (("predict", "nowhere", "x"), "nowhere is no run"),
    ],
)
def test_a_mistake_is_one_line(arguments, complaint, tmp_path, monkeypatch, as_installed):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2
    assert complaint in done.output
    assert "Traceback" not in done.output


@pytest.mark.process
def test_a_run_is_never_written_over(trained, as_installed):
    done = CliRunner().invoke(app, ["train", "translation", "--preset", "tiny", *SMALL, "--out", str(trained)])
    assert done.exit_code == 2
    assert "holds a run already" in done.output


def test_settings_by_the_end_of_their_name():
    config = configure(TRANSLATION, "tiny", [], parsed(["heads=8", "train.seed=7", "model=transformer", "beam=3"]))
    assert (config.model.heads, config.train.seed, config.model.kind, config.decode.beam) == (8, 7, "transformer", 3)
    with pytest.raises(SettingError, match=r"could be data\.seed or train\.seed"):
        changed(tiny(), {"seed": "3"})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_configurations(name):
    config = PRESETS[name].make()
    assert isinstance(config, TranslationConfig)
    assert TranslationConfig.model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("attention", get_args(AttentionName))
def test_every_mechanism_translates_and_learns(attention):
    settings = tiny().model.model_copy(update={"attention": attention, "size": 8, "embedding": 6})
    model = build(settings, (11, 13), shared=False)
    source, prefix = torch.randint(3, 11, (2, 7)), torch.randint(3, 13, (2, 5))
    decoded = model(source, prefix, torch.tensor([7, 4]))
    model.logits(decoded.states).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "attention" in name)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "relative", "rotary", "alibi", "none"])
def test_every_kind_of_positions(positions):
    changes = {"kind": "transformer", "positions": positions, "size": 8, "heads": 2, "layers": 1}
    model = build(tiny().model.model_copy(update=changes), (11, 11), shared=True).eval()
    source, prefix = torch.arange(3, 10)[None], torch.tensor([[3, 4, 5, 6, 7]])
    states = model(source, prefix).states
    assert states.shape == (1, 5, 8)
    swapped = model(source[:, [0, 2, 1, 3, 4, 5, 6]], prefix).states
    assert torch.allclose(swapped, states, atol=1e-5) == (positions == "none"), "only positions make order matter"
