"""`regard bench decoding`: all contenders do the same work with the same weights. No test depends on measured times."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from regard.bench import decoding_bench, decoding_peers
from regard.bench.decoding_bench import TINY
from time_limits import HANG_SECONDS

PEERS = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """Run the benchmark quickly; return the record printed as JSON, and the path of the page that it wrote."""
    folder = tmp_path_factory.mktemp("decoding")
    (folder / "docs").mkdir()
    (folder / "docs" / "decoding.md").write_text("# Ours\n\n<!-- cpu -->\nold\n<!-- end -->\n\nThe end.\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "regard", "bench", "decoding", "--device", "cpu", "--quick"),
            *("--json", "--out", "docs"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONUTF8": "1", "COLUMNS": "140"},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "docs" / "decoding.md"  # standard output is the JSON alone


@pytest.mark.process
def test_the_record_has_every_side(measured):
    record, _ = measured
    assert record["setting"] == vars(TINY)
    found = {each["name"]: each for each in record["contenders"]}
    for name in ("regard float32", "regard int8", "HF generate"):
        assert found[name]["rate"] == pytest.approx(TINY.sentences / found[name]["seconds"])
        assert found[name]["ratio"] == pytest.approx(found[name]["rate"] / found["HF generate"]["rate"])
    for name in ("CTranslate2 float32", "CTranslate2 int8"):
        assert found[name]["rate"] is not None or found[name]["reason"] == "ctranslate2 is not installed"
    assert {"torch", "transformers"} <= record["versions"].keys()


@pytest.mark.process
def test_the_table_is_on_the_screen_and_on_the_page(measured, capsys, monkeypatch):
    record, page = measured
    monkeypatch.setenv("COLUMNS", "140")
    decoding_bench.show(record)
    printed = capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("# Ours\n")
    assert text.endswith("The end.\n")
    assert "old" not in text
    for row in decoding_bench.rows(record):
        assert f"| {' | '.join(row)} |" in text
        assert row[0] in printed
    # Writing the same record a second time does not change the page.
    assert decoding_bench.write(record, page.parent).read_text() == text


@pytest.mark.slow
def test_marian_says_the_same_as_the_model():
    model = decoding_bench.model_of(TINY, "cpu")
    peer = decoding_peers.marian(model, positions=16)
    source, prefix = torch.randint(3, TINY.vocabulary, (3, 7)), torch.randint(3, TINY.vocabulary, (3, 5))
    with torch.no_grad():
        wanted = model.logits(model(source, prefix).states)
        found = peer(input_ids=source, decoder_input_ids=prefix).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_all_search_alike():
    """If no contender stops early, outputs differ only in the last token, which this library sets to the end token."""
    model = decoding_bench.model_of(TINY, "cpu")
    peer = decoding_peers.marian(model, positions=16)
    source = torch.randint(3, TINY.vocabulary, (7, 5), generator=torch.Generator().manual_seed(2))
    sides = {"hf": decoding_peers.generate(peer, 1), "regard": decoding_bench.regard(model, 1)}
    if importlib.util.find_spec("ctranslate2") is not None:
        sides["ct2"] = decoding_peers.ctranslate2(peer, 1, "float32", 1)
    found = {name: [row[:-1] for row in decode(source, 6)] for name, decode in sides.items()}
    assert all(len(row) == 5 for rows in found.values() for row in rows)
    assert all(rows == found["hf"] for rows in found.values())


def test_a_model_marian_cannot_be_is_refused():
    from regard.models.frame import EncoderDecoder
    from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder

    options = {"layers": 1, "heads": 2}
    model = EncoderDecoder(TransformerEncoder(11, 8, **options), TransformerDecoder(11, 8, **options))
    with pytest.raises(ValueError, match="Marian is a post-norm Transformer"):
        decoding_peers.marian(model, positions=16)


@pytest.mark.slow
def test_a_side_that_fails_keeps_its_place(monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'ctranslate2'", name="ctranslate2")

    def broken(*_):
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr(decoding_bench, "ctranslate2", missing)
    monkeypatch.setattr(decoding_bench, "quantize", broken)
    record = decoding_bench.run(TINY, device="cpu", quick=True, say=lambda _: None)
    found = {each["name"]: each["reason"] for each in record["contenders"]}
    assert found["CTranslate2 int8"] == "ctranslate2 is not installed"
    assert found["regard int8"] == "RuntimeError: no such thing"
    assert found["HF generate"] is None
    assert "Not run: CTranslate2 int8: ctranslate2 is not installed." in decoding_bench.markdown(record)


@pytest.mark.parametrize("place", ["file/below", "held"])
def test_a_place_that_cannot_be_written_is_told_first(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "held" / "decoding.md").mkdir(parents=True)
    monkeypatch.setattr(decoding_bench, "run", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(typer.BadParameter, match=r"cannot write to .*(file.below|held): [A-Z]"):
        decoding_bench.decoding(device="cpu", quick=True, as_json=True, out=tmp_path / place)


def test_a_try_leaves_the_page_as_it_was(tmp_path, monkeypatch, capsys):
    (tmp_path / "decoding.md").write_text("# Ours\n")
    seen = []

    def run(*_, **__):
        seen.append(((tmp_path / "decoding.md").read_text(), sorted(tmp_path.iterdir())))
        return {"contenders": []}

    monkeypatch.setattr(decoding_bench, "run", run)
    monkeypatch.setattr(decoding_bench, "write", lambda record, out: out)
    decoding_bench.decoding(device="cpu", quick=True, as_json=True, out=tmp_path)
    assert seen == [("# Ours\n", [tmp_path / "decoding.md"])]
    assert json.loads(capsys.readouterr().out) == {"contenders": []}


@pytest.mark.process
def test_a_wrong_device_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "regard", "bench", "decoding", "--device", "tpu"],
        env={**os.environ, "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 2
    assert "must be cpu, or cuda where there is one; got tpu" in done.stderr
