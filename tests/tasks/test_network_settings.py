"""Tests of the translator's model built from settings: numbers of layers, keys and values of attention, residual
connections."""

import json

import pytest
import torch
from torch import nn

from regard.core.requests import full
from regard.tasks.config_overrides import configure
from regard.tasks.task import SettingError
from regard.tasks.training import train
from regard.tasks.translation.config import ModelSettings, TranslationConfig
from regard.tasks.translation.network import build
from regard.tasks.translation.presets import tiny
from regard.tasks.translation.task import TRANSLATION
from regard.train.progress_display import Silent
from regard.train.run_directory import RunError

SIZES = (11, 13)


@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_a_decoder_may_have_other_many_layers(kind):
    def decoder_layers(**chosen: int) -> int:
        decoder = build(ModelSettings(kind=kind, size=8, layers=3, **chosen), SIZES, shared=False).decoder
        return decoder.recurrence.layers if kind == "recurrent" else len(decoder.stack.layers)

    assert decoder_layers() == 3
    assert decoder_layers(decoder_layers=2) == 2


@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
@pytest.mark.parametrize("content", ["words", "both"])
def test_keys_and_values_are_as_chosen(kind, content):
    model = build(ModelSettings(kind=kind, size=8, layers=1, values=content), SIZES, shared=False).eval()
    source, prefix = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6]])
    memory = model.encoder(source)
    plain = ModelSettings(kind=kind, size=8, layers=1)
    states = build(plain, SIZES, shared=False).eval()
    own = states.encoder.state_dict()
    states.encoder.load_state_dict({name: part for name, part in model.encoder.state_dict().items() if name in own})
    torch.testing.assert_close(memory.keys, states.encoder(source).keys)
    assert not torch.allclose(memory.values, memory.keys)
    weights = model(source, prefix, weights=full()).weights
    rows = weights[0] if kind == "transformer" else weights
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_residuals_and_normalisation_are_as_chosen(norm, residual):
    """Disabled normalisation layers have no parameters, and all other parameters have the same initial values."""
    chosen = ModelSettings(kind="transformer", size=8, layers=2, norm=norm, residual=residual)
    torch.manual_seed(5)
    made = build(chosen, SIZES, shared=False)
    torch.manual_seed(5)
    usual = build(ModelSettings(kind="transformer", size=8, layers=2, norm="post"), SIZES, shared=False)
    norms = [name for name, part in made.named_modules() if isinstance(part, nn.LayerNorm)]
    assert len(norms) == {"pre": 2 * 2 + 2 * 3 + 2, "post": 2 * 2 + 2 * 3, "none": 0}[norm]
    parts = [part for part in made.modules() if hasattr(part, "residual")]
    assert [part.residual for part in parts] == [residual] * 10
    started = usual.state_dict()
    for name, value in made.state_dict().items():
        if "norm" not in name:
            assert torch.equal(value, started[name]), name


def test_residuals_are_the_transformers():
    with pytest.raises(SettingError, match=r"model\.residual has no effect: .* model\.kind is recurrent"):
        configure(TRANSLATION, "tiny", [], {"model.residual": "false"})


def test_a_configuration_from_before_is_read_as_it_was():
    old = TranslationConfig().model_dump(mode="json")
    for part, names in (("model", ("keys", "values", "decoder_layers")), ("decode", ("posterior",))):
        for name in names:
            del old[part][name]
    assert TranslationConfig.model_validate(old) == TranslationConfig()
    assert TranslationConfig().model.values == TranslationConfig().model.keys == "states"


@pytest.mark.slow
def test_a_run_from_before_goes_on(tmp_path):
    """A run can be resumed although its config.json, from an earlier version of regard, lacks some settings."""
    chosen = tiny().model_copy(update={"train": tiny().train.model_copy(update={"steps": 2, "validate_every": 2})})
    few = {"train": 40, "valid": 4, "test": 4, "longer": 0, "lengths": (3, 6)}
    model = {"size": 8, "embedding": 8}
    chosen = chosen.model_copy(
        update={"data": chosen.data.model_copy(update=few), "model": chosen.model.model_copy(update=model)}
    )
    train(TRANSLATION, chosen, tmp_path / "run", progress=Silent())
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    later = {"data": ("merge_dropout", "cuts"), "model": ("keys", "values", "decoder_layers", "inner_dropout")}
    for part, names in later.items():
        for name in names:
            stored[part].pop(name, None)
    path.write_text(json.dumps(stored))
    (tmp_path / "run" / "manifest.json").unlink()
    more = chosen.model_copy(update={"train": chosen.train.model_copy(update={"steps": 3})})
    assert train(TRANSLATION, more, tmp_path / "run", resume=True, progress=Silent())["steps"] == 3
    other = more.model_copy(update={"model": more.model.model_copy(update={"size": 16})})
    with pytest.raises(RunError, match=r"model.size was 8 and is now 16"):
        train(TRANSLATION, other, tmp_path / "run", resume=True, progress=Silent())
