"""The first steps of a new user who only knows the README: messages, and suggested commands."""

import io
import json
import random
from pathlib import Path

import jaxtyping
import pytest
import torch
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.run_commands import show_result
from regard.data.text.bpe import train_bpe
from regard.look.trace import Trace
from regard.tasks.config_overrides import changed, listed
from regard.tasks.task import SettingError
from regard.tasks.translation.presets import tiny
from regard.tasks.translation.task import TRANSLATION

FEW = (
    *("--preset", "tiny", "--set", "steps=3", "--set", "validate_every=2", "--set", "data.valid=8"),
    *("--set", "data.test=8", "--set", "model.size=8", "--set", "embedding=8", "--set", "longer=0"),
)
NOUNS = ("Hund", "Katze", "Maus", "Vogel", "Fisch", "Pferd")


@pytest.fixture(autouse=True)
def plain(monkeypatch, as_installed):
    monkeypatch.setenv("COLUMNS", "100")


def regard(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> tuple[Path, list[str]]:
    """Return a folder with two text files and a run trained on them without attention, and the source lines."""
    folder, draw = tmp_path_factory.mktemp("own"), random.Random(3)
    pairs = [(draw.choice(NOUNS), draw.randrange(10**6), draw.choice("追逐看见")) for _ in range(90)]
    lines = [f"der {noun} sieht {number} Bäume" for noun, number, _ in pairs]
    (folder / "a.de").write_text("\n".join(lines), encoding="utf-8")
    (folder / "a.zh").write_text("\n".join(f"{number} {letter}" for _, number, letter in pairs), encoding="utf-8")
    data = ("--data", folder / "a.de", "--data", folder / "a.zh", "--set", "vocabulary=270")
    jaxtyping.config.update("jaxtyping_disable", True)
    code, said = regard("train", "translation", *FEW, *data, "--set", "attention=none", "--out", folder / "run")
    jaxtyping.config.update("jaxtyping_disable", False)
    assert code == 0, said
    (folder / "said").write_text(said, encoding="utf-8")
    return folder, lines


def test_after_training_a_sentence_of_ones_own_is_suggested(own):
    folder, lines = own
    said = (folder / "said").read_text(encoding="utf-8")
    [suggested] = [line.strip() for line in said.splitlines() if "regard predict" in line]
    assert "Tom" not in said
    assert suggested.startswith(f"regard predict {folder / 'run'} 'der ")
    assert suggested.rpartition(" 'der ")[2].rstrip("'") in "\n".join(lines)
    assert f"regard studio {folder / 'run'}" in said
    code, answer = regard("predict", folder / "run", json.loads((folder / "run/result.json").read_text())["example"])
    assert code == 0
    assert answer.strip() or answer == "\n"


@pytest.mark.slow
def test_the_built_in_world_is_written_as_what_it_is(tmp_path):
    settings = ("--set", "data.train=60", "--set", "attention=dot", "--out", tmp_path / "run")
    code, said = regard("train", "translation", *FEW, *settings)
    assert code == 0, said
    data = json.loads((tmp_path / "run/config.json").read_text())["data"]
    assert (data["source"], data["target"]) == ("en", "zh")
    assert "'Tom chases Jerry'" in said
    code, said = regard("look", tmp_path / "run", "--out", tmp_path / "new/page.html")
    assert code == 0, said
    assert (tmp_path / "new/page.html").stat().st_size > 10_000


def test_pieces_of_a_character_are_shown_as_bytes(own):
    folder, _ = own
    code, said = regard("predict", folder / "run", "der 猫", "--json")
    assert code == 0
    pieces = json.loads(said)["source_pieces"]
    assert "".join(pieces).endswith("猫⟨1/3⟩猫⟨2/3⟩猫⟨3/3⟩")
    assert "�" not in "".join(pieces)


def test_labels_of_sub_words():
    subwords = train_bpe(["追逐 追逐 追 é �"] * 4, size=300)
    labels = [subwords.label(number) for number in range(3, subwords.size)]
    assert {"追", "é", "�", "a", " "} <= set(labels)
    assert len(set(labels)) == len(labels)  # no two tokens have the same label
    assert [subwords.label(number) for number in subwords.encode("ü🐭")] == [
        "<C3>",
        "<BC>",
        "<F0>",
        "<9F>",
        "<90>",
        "<AD>",
    ]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sise": "3"}, "no setting is called 'sise': did you mean model.size? (--set help lists them all)"),
        ({"steps": "many"}, "train.steps: expected a whole number, got 'many'"),
        ({"steps": "1.5"}, "train.steps: expected a whole number, got 1.5"),
        ({"steps": "0"}, "train.steps: expected a whole number above 0, got 0"),
        ({"dropout": "1"}, "model.dropout: expected a number below 1, got 1"),
        ({"smoothing": "-1"}, "smoothing: expected a number of at least 0, got -1"),
        ({"final_share": "2"}, "train.final_share: expected a number of at most 1, got 2"),
        ({"embedding": "x"}, "model.embedding: expected a whole number or none, got 'x'"),
        ({"shared": "maybe"}, "data.shared: expected true or false, got 'maybe'"),
        ({"cell": "rnn"}, "model.cell: expected one of gru, lstm, got 'rnn'"),
        ({"lengths": "[3]"}, "data.lengths: expected a list such as [3, 15], got [3]"),
        ({"lengths": '[3,"x"]'}, "data.lengths: expected a whole number, got 'x'"),
        ({"source": "3"}, "data.source: expected text, got 3"),
        ({"clip": "-1"}, "train.clip: expected a number above 0 or none, got -1"),
    ],
)
def test_a_setting_that_cannot_be_says_what_was_expected_and_what_came(settings, complaint):
    with pytest.raises(SettingError) as error:
        changed(tiny(), settings)
    assert str(error.value) == complaint


def test_a_setting_unlike_any_is_answered_with_all_of_them_in_groups():
    with pytest.raises(SettingError) as error:
        changed(tiny(), {"zzzz": "1"})
    first, *lines = str(error.value).splitlines()
    assert first.startswith("no setting is called 'zzzz'")
    assert max(map(len, lines)) <= 80
    starts = [line.split()[0] for line in lines if not line.startswith("     ")]
    assert starts == ["data", "model", "train", "learning", "decode", "others"]
    assert "decode    beam, length_penalty" in str(error.value)


def test_none_means_nothing_where_that_can_be_and_is_a_word_elsewhere():
    config = changed(tiny(), {"embedding": "none", "attention": "none", "epochs": "none"})
    assert (config.model.embedding, config.model.attention, config.train.epochs) == (None, "none", None)


def test_what_is_wrong_with_several_settings_together_keeps_its_own_words():
    class Pair(BaseModel):
        model_config = ConfigDict(use_attribute_docstrings=True)
        low: int = 0
        """The lower number."""

        def model_post_init(self, _: object) -> None:
            if self.low > 3:
                raise ValueError("low must not be above 3")

    with pytest.raises((SettingError, ValueError), match="low must not be above 3"):
        changed(Pair(), {"low": "4"})


def test_settings_are_listed_with_what_they_are_and_mean():
    code, said = regard("train", "translation", "--preset", "tiny", "--set", "help")
    assert code == 0
    lines = [line.split() for line in said.splitlines()]
    assert ["size", "160", "Size", "of", "the", "states."] in lines
    assert "One of gru, lstm." in said
    assert all(one.name.rpartition(".")[2] in said for one in listed(tiny()))
    assert "none" in next(line for line in lines if line and line[0] == "epochs")
    code, said = regard("train", "translation", "--preset", "huge", "--set", "help")
    assert code == 2
    assert "no preset is called 'huge'" in said


def test_looking_at_what_is_not_there_or_no_trace(tmp_path, own):
    (tmp_path / "notes.txt").write_text("some words")
    (tmp_path / "empty").mkdir()
    for what, complaint in {
        tmp_path / "nowhere": "nowhere does not exist: expected a trace file or the directory of a run",
        tmp_path / "notes.txt": "notes.txt is not a trace: its header does not fit the file",
        tmp_path / "empty": "empty is no run",
        own[0] / "run": "has no attention: there is nothing to look at",
    }.items():
        code, said = regard("look", what, "--out", tmp_path / "page.html")
        assert code == 2
        assert complaint in said
        assert "Errno" not in said
        assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written(tmp_path):
    trace = Trace.from_weights({"a": torch.eye(2)[None]}).save(tmp_path / "a.trace")
    code, said = regard("look", trace, "--out", tmp_path / "a.trace" / "page.html")
    assert code == 2
    assert said.strip().endswith(("a.trace: File exists", "a.trace: Not a directory"))
    assert said.startswith("regard: cannot write ")
    assert regard("look", trace, "--language", "fr")[1] == "regard: language must be one of en, zh, got 'fr'\n"


def test_a_studio_of_no_trace_does_not_start(tmp_path):
    (tmp_path / "notes.txt").write_text("some words")
    code, said = regard("studio", tmp_path / "notes.txt", "--port", "0")
    assert (code, said) == (2, "regard: notes.txt is not a trace: its header does not fit the file\n")
    code, said = regard("studio", "--host", "999.1.1.1", "--port", "0")
    assert code == 2
    assert said.startswith("regard: 999.1.1.1:0 cannot be used (")
    assert "studio running" not in said


def test_a_page_of_a_run_without_attention_is_not_written(own, tmp_path):
    code, said = regard("predict", own[0] / "run", "der Hund", "--look", tmp_path / "page.html")
    assert code == 2
    assert "no attention" in said or "nothing to translate" in said
    assert not (tmp_path / "page.html").exists()


def test_evaluating_on_a_file_that_is_not_there(own):
    code, said = regard("evaluate", own[0] / "run", "--data", "nowhere.tsv")
    assert (code, said) == (2, "regard: no such file: nowhere.tsv\n")


def test_figures_have_names_that_can_be_read():
    file = io.StringIO()
    result = {"metrics": {"bleu": 12.0, "exact": 0.5}, "faithfulness": {"attended": -0.001}}
    show_result(TRANSLATION, result, Console(width=100, file=file))
    said = file.getvalue()
    assert [line.split() for line in said.splitlines() if "BLEU" in line] == [["BLEU", "12.0"]]
    assert "exactly as the reference" in said
    assert "-0.00" not in said


@pytest.mark.parametrize("command", ["train", "predict", "look", "studio", "demo", "evaluate"])
def test_help_names_values_as_people_do(command):
    code, said = regard(command, "--help")
    assert code == 0
    options = said.partition("Options:")[2]
    assert "<" not in options.replace("<=", "")
    assert "range" not in options
