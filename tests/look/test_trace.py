"""Tests of attention records, token labels and traces (lists of records) that are built from given weights."""

import io
import math
import re
import sys
from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from PIL import Image

from regard.look.attention_records import Given, Record
from regard.look.labels import Labels, as_labels, patches
from regard.look.recomputed_weights import Joined
from regard.look.rollout import rollout
from regard.look.trace import Trace

B, H, Q, K = 2, 3, 5, 7


@pytest.fixture
def weights() -> torch.Tensor:
    return torch.randn(B, H, Q, K).softmax(-1)


@pytest.fixture
def record(weights: torch.Tensor) -> Record:
    return Record("layer", "given", Given(weights))


def test_weights_of_a_head_a_row_and_a_sequence(record, weights):
    torch.testing.assert_close(record.weights(batch=1), weights[1])
    torch.testing.assert_close(record.weights(head=2), weights[0, 2])
    torch.testing.assert_close(record.weights(head=2, queries=[4, -5], batch=1), weights[1, 2, [4, 0]])
    torch.testing.assert_close(record.weights(queries=slice(1, 4, 2)), weights[0, :, [1, 3]])


def test_half_precision_on_any_device_comes_as_float32_on_the_cpu(weights):
    found = Record("layer", "given", Given(weights.bfloat16())).weights()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, weights[0].bfloat16().float())


def test_summaries_are_those_of_the_weights(record, weights):
    values, indices = record.top(2, batch=1)
    assert values.shape == indices.shape == (H, Q, 2)
    torch.testing.assert_close(weights[1].gather(-1, indices), values)
    torch.testing.assert_close(values[..., 0], weights[1].amax(-1))
    torch.testing.assert_close(record.received(), weights[0].sum(-2))
    torch.testing.assert_close(record.entropy(), torch.distributions.Categorical(weights[0]).entropy())
    assert record.top(99).values.shape == (H, Q, K)


def test_a_zero_weight_adds_no_entropy():
    record = Record("layer", "given", Given(torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])))
    torch.testing.assert_close(record.entropy(), torch.tensor([[0.0, math.log(2)]]))


def test_summaries_do_not_depend_on_the_block(record, monkeypatch):
    whole = record.received(), record.entropy(), record.top(3).values, record.overview(4, head=1)
    monkeypatch.setattr("regard.look.attention_records.BLOCK_NUMBERS", 2 * H * K)
    parts = record.received(), record.entropy(), record.top(3).values, record.overview(4, head=1)
    for expected, found in zip(whole, parts, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("queries", "keys", "size"), [(12, 8, 4), (13, 7, 5), (3, 11, 4), (3, 2, 9)])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_an_overview_covers_every_weight_once(queries, keys, size, pool):
    weights = torch.rand(queries, keys)
    high, wide = min(size, queries), min(size, keys)
    expected = torch.zeros(high, wide)
    for i in range(high):
        for j in range(wide):
            cell = [
                weights[r, c].item()
                for r in range(queries)
                for c in range(keys)
                if r * high // queries == i and c * wide // keys == j
            ]
            expected[i, j] = max(cell) if pool == "max" else sum(cell) / len(cell)
    found = Record("layer", "given", Given(weights[None, None])).overview(size, head=0, pool=pool)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda record: record.weights(head=3), "head 3 of 'layer': there are 3"),
        (lambda record: record.weights(batch=2), "batch 2 of 'layer': there are 2"),
        (lambda record: record.weights(queries=[5]), r"queries \[5\] of 'layer': there are 5"),
        (lambda record: record.overview(0, head=0), "size must be at least 1, got 0"),
        (lambda record: record.top(0), "k must be at least 1"),
        (lambda record: record.gradient(), "no gradients were kept"),
    ],
)
def test_what_is_not_there_is_named(record, ask, message):
    with pytest.raises((IndexError, ValueError), match=message):
        ask(record)


def test_a_trace_is_addressed_by_name_and_call(weights):
    trace = Trace(records=[Record("a.b", "given", Given(weights), call=call) for call in range(2)])
    assert trace["a.b"].call == 0
    assert trace["a.b", 1].call == 1
    with pytest.raises(KeyError, match=r"no call 2: seen were \[0, 1\]"):
        trace["a.b", 2]
    with pytest.raises(KeyError, match=r"no attention was seen under 'a\.c'; there is 'a\.b'"):
        trace["a.c"]
    assert trace.names == ["a.b"]
    assert len(trace.select("a.*")) == 2
    assert len(trace.select("b.*")) == 0


def test_weights_shared_by_records_are_counted_once(weights):
    trace = Trace(records=[Record("a", "given", Given(weights[..., :3])), Record("b", "given", Given(weights))])
    assert trace.nbytes == weights.nbytes


def test_labels_go_where_they_fit():
    trace = Trace.from_weights({"self": torch.rand(2, 3, 3), "cross": torch.rand(2, 3, 5)})
    assert trace.label(rows=["a", "b", "c"], columns=list("vwxyz")) is trace
    assert trace["self"].row_labels.items == ("a", "b", "c")
    assert trace["self"].column_labels is None
    assert trace["cross"].column_labels.items == tuple("vwxyz")
    trace.label(columns=["a", "b", "c"], of="se*")
    assert trace["self"].column_labels.items == ("a", "b", "c")
    with pytest.raises(ValueError, match=r"columns has 3 labels, but the records have \[5\] columns"):
        trace.label(columns=["a", "b", "c"], of="cross")
    with pytest.raises(ValueError, match=r"rows has 1 labels, but the records have \[3\] rows"):
        trace.label(rows=["a"])
    with pytest.raises(ValueError, match="no record fits of='x'"):
        trace.label(rows=["a"], of="x")


class OfTransformers:
    def convert_ids_to_tokens(self, ids):
        return [f"t{number}" for number in ids]


class OfTokenizers:
    def id_to_token(self, id):
        return None if id == 9 else f"t{id}"


class OfOurs:
    def decode(self, ids):
        return "".join(f"t{number}" for number in ids)


@pytest.mark.parametrize("tokenizer", [OfTransformers(), OfTokenizers(), OfOurs()])
@pytest.mark.parametrize("ids", [[4, 2], torch.tensor([4, 2]), torch.tensor([[4, 2]])])
def test_labels_from_a_tokenizer(tokenizer, ids):
    labels = as_labels((tokenizer, ids))
    assert (labels.kind, labels.items) == ("tokens", ("t4", "t2"))


def test_labels_that_cannot_be_are_refused(as_installed):
    with pytest.raises(ValueError, match="labels of 2 sequences were given: choose one sequence of the batch"):
        as_labels((OfOurs(), torch.tensor([[1], [2]])))
    with pytest.raises(TypeError, match="got the one string 'abc'"):
        as_labels("abc")
    with pytest.raises(TypeError, match="labels must be strings, got int 1"):
        as_labels([1])
    with pytest.raises(ValueError, match=r"grid \(2, 2\) of the labels does not hold 3 patches"):
        Labels("patches", ("a", "b", "c"), {"grid": (2, 2)})
    with pytest.raises(ValueError, match=r"grid \(1, 2\).*4 patches and 1 special items; .*first 1 .*special=2"):
        Labels("patches", tuple("abcd"), {"grid": (1, 2), "special": 1})
    with pytest.raises(ValueError, match="special of the labels is a number of items, 0 or more, got -1"):
        Labels("patches", tuple("abcd"), {"grid": (1, 5), "special": -1})


def test_patches_of_an_image_with_tokens_before_them(tmp_path):
    file = tmp_path / "red.jpg"
    Image.new("RGB", (30, 20), (200, 0, 0)).save(file)
    labels = patches(file, (2, 3), special=["[CLS]", "[REG]"])
    assert labels.items == ("[CLS]", "[REG]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2")
    assert (labels.extra["grid"], labels.extra["special"]) == ((2, 3), 2)
    assert Image.open(io.BytesIO(labels.extra["image"])).size == (30, 20)
    trace = Trace.from_weights({"vit": torch.full((1, 8, 8), 1 / 8)}).label(rows=labels, columns=labels)
    again = Trace.load(trace.save(tmp_path / "vit.safetensors"))["vit"].column_labels
    assert again.items == labels.items
    assert again.extra == labels.extra
    assert patches(labels.extra["image"], (2, 3)).extra["special"] == 0
    with pytest.raises(ValueError, match="these bytes: not a picture that can be read"):
        patches(b"none", (1, 1))
    with pytest.raises(ValueError, match="kind of labels must be one of"):
        Labels("words", ())


@pytest.mark.parametrize("wrong", [torch.rand(3, 3), torch.ones(2, 3, 3, dtype=torch.long), "text"])
def test_from_weights_refuses_what_are_no_weights(as_installed, wrong):
    with pytest.raises(ValueError, match="weights of 'x' must be a float tensor"):
        Trace.from_weights({"x": wrong})


def test_rollout_by_hand():
    first, second = torch.rand(2, 3, 4, 4).softmax(-1)
    one, two = (0.5 * layer.mean(0) + 0.5 * torch.eye(4) for layer in (first, second))
    trace = Trace.from_weights({"one": first, "two": second})
    torch.testing.assert_close(trace.rollout(), two @ one)
    torch.testing.assert_close(trace.rollout(of="two"), two)
    torch.testing.assert_close(trace.rollout(residual=0.0), second.mean(0) @ first.mean(0))
    torch.testing.assert_close(trace.rollout().sum(-1), torch.ones(4))


def test_rollout_refuses_what_is_not_square(record):
    with pytest.raises(ValueError, match="layers of one square size, 5 × 5; 'layer' has 5 × 7"):
        rollout([record])
    with pytest.raises(ValueError, match="at least one record"):
        rollout([])


TRANSFORMER = [f"encoder.layers.{n}.self_attn" for n in range(2)] + [
    f"decoder.layers.{n}.{kind}" for n in range(2) for kind in ("self_attn", "multihead_attn")
]
TOWERS = [f"towers.{tower}.layers.{n}.attn" for tower in range(2) for n in range(2)]


@pytest.mark.parametrize(
    ("names", "of", "named"),
    [
        (TRANSFORMER, None, "decoder.layers.*.multihead_attn' (cross-attention): choose one with of="),
        (TRANSFORMER, "decoder.*", "got 'decoder.layers.*.self_attn', 'decoder.layers.*.multihead_attn' (cross"),
        (TRANSFORMER, "*.self_attn", "such as of='encoder.layers.*.self_attn'"),
        (TRANSFORMER, "*.multihead_attn", "got 'decoder.layers.*.multihead_attn' (cross-attention)"),
        (TOWERS, None, "got 'towers.*.layers.0.attn', 'towers.*.layers.1.attn'"),
        (["encoder.attn", "decoder.attn"], None, "got 'encoder.*', 'decoder.*'"),
        (["cross_attention"], None, "got 'cross_attention' (cross-attention)"),
        (["first", "layers.0.attn"], None, "got 'first', 'layers.*.attn'"),
    ],
)
def test_rollout_refuses_several_stacks_and_cross_attention(names, of, named):
    trace = Trace.from_weights({name: torch.eye(3)[None] for name in names})
    with pytest.raises(ValueError, match=re.escape(named)):
        trace.rollout(of=of)


@pytest.mark.parametrize(
    ("names", "of"),
    [(TRANSFORMER, "encoder.*"), (TRANSFORMER, "decoder.layers.*.self_attn"), (TOWERS, "towers.1.*")],
)
def test_rollout_of_one_stack_among_several(names, of):
    """The matrix of each layer is half the identity and half the swap of two positions, so every entry of the rollout,
    the product of the layers, is 0.5."""
    weights = {name: torch.eye(2)[None].flip(-1) if fnmatch(name, of) else torch.eye(2)[None] for name in names}
    torch.testing.assert_close(Trace.from_weights(weights).rollout(of=of), torch.full((2, 2), 0.5))


def test_rollout_refuses_two_passes_and_takes_a_layer_that_is_applied_twice():
    swap = Given(torch.eye(2)[None, None].flip(-1))
    passes = [Record(f"layers.{n}.attn", "given", swap, call=call) for call in range(2) for n in range(2)]
    trace = Trace(records=passes)
    with pytest.raises(ValueError, match="one pass through the layers, and the trace has several calls"):
        trace.rollout()
    first = Trace(records=[record for record in trace if record.call == 0])
    torch.testing.assert_close(first.rollout(residual=0.0), torch.eye(2))
    shared = [Record("layers.0.attn", "given", swap, call=call) for call in range(3)]
    torch.testing.assert_close(Trace(records=shared).rollout(residual=0.0), torch.eye(2).flip(-1))


def test_steps_are_joined_with_zeros_before_a_key_was_there():
    parts = [torch.rand(1, 2, queries, keys) for queries, keys in ((3, 3), (1, 4), (1, 5))]
    record = Record("layer", "rows", Joined([Given(part) for part in parts]))
    assert (record.queries, record.keys) == (5, 5)
    found = record.weights()
    torch.testing.assert_close(found[:, :3, :3], parts[0][0])
    torch.testing.assert_close(found[:, 3, :4], parts[1][0, :, 0])
    torch.testing.assert_close(found[:, 4], parts[2][0, :, 0])
    assert not found[:, :3, 3:].any()
    torch.testing.assert_close(record.weights(head=1, queries=[4, 0]), found[1, [4, 0]])


def test_a_trace_joins_calls_of_one_name_and_leaves_others():
    def calls(name, shapes):
        return [Record(name, "rows", Given(torch.rand(*shape)), call=n) for n, shape in enumerate(shapes)]

    grows = calls("grows", [(1, 2, 3, 3), (1, 2, 1, 4)])
    shrinks = calls("shrinks", [(1, 2, 1, 4), (1, 2, 1, 3)])
    trace = Trace(records=[*grows, *shrinks]).joined()
    assert [(record.name, record.queries, record.keys) for record in trace] == [
        ("grows", 4, 4),
        ("shrinks", 1, 4),
        ("shrinks", 1, 3),
    ]
    assert trace["grows"].check() is None


def test_pictures_are_written(tmp_path):
    from PIL import Image

    trace = Trace.from_weights({"cross": torch.rand(2, 3, 2)}, rows=["猫", "坐", " "], columns=["cat", "<sat>"])
    drawing = trace.svg(tmp_path / "a.svg", head=1).read_text()
    assert drawing.count("class='cell'") == 6
    assert "&lt;sat&gt;" in drawing
    assert "<title>cross · head 1</title>" in drawing
    with Image.open(trace.png(tmp_path / "a.png", record="cross")) as picture:
        assert picture.format == "PNG"
        assert picture.width > 2 * 24
    large = Trace.from_weights({"long": torch.rand(1, 300, 200)})
    assert large.svg(tmp_path / "b.svg").read_text().count("class='cell'") == 64 * 64
    with pytest.raises(ValueError, match="no records to draw"):
        Trace().svg(tmp_path / "c.svg")


def test_drawings_call_layers_by_their_words_and_one_head_by_none(tmp_path):
    names = ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    trace = Trace.from_weights({name: torch.rand(3, 2, 2, 2) for name in names})
    second = trace.svg(tmp_path / "a.svg", record=names[1], head=0, batch=2).read_text()
    assert "<title>encoder 1 · head 0 · sequence 2</title>" in second
    mean = trace.svg(tmp_path / "a.svg", head="mean").read_text()
    assert "<title>encoder 0 · mean of 2 heads · sequence 0</title>" in mean
    alone = Trace.from_weights({"cross": torch.rand(1, 2, 2)}).svg(tmp_path / "a.svg", head="mean").read_text()
    assert "<title>cross</title>" in alone


def drawn_pixels(path):
    from PIL import Image

    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def blocks(pixels, color) -> list[tuple[int, int, int, int]]:
    """Return the bounding box (left, top, right, bottom) of the pixels with exactly this colour, in a list."""
    rows, columns = np.nonzero((pixels == color).all(-1))
    return [(columns.min(), rows.min(), columns.max(), rows.max())] if len(rows) else []


def test_a_png_has_a_cell_for_each_weight_in_its_colour_and_its_value(tmp_path):
    """For weights 1 and 0, the left cell and the right end of the colour bar are dark blue, the right cell is light."""
    trace = Trace.from_weights({"x": torch.tensor([[[1.0, 0.0]]])}, rows=["r"], columns=["a", "b"])
    pixels = drawn_pixels(trace.png(tmp_path / "a.png"))
    # The row of pixels at the top of the colour bar, which begins 48 pixels from the left and is 320 pixels wide.
    bar = len(pixels) - 2 * (24 + 24)
    assert tuple(pixels[bar + 8, 48 + 319]) == (0, 64, 160)
    assert tuple(pixels[bar + 8, 48]) == (242, 245, 251)
    middle = pixels[bar + 8, 48 : 48 + 320].sum(-1)
    assert (np.diff(middle) <= 0).all()  # the colour bar gets darker from left to right
    [(left, top, right, bottom)] = blocks(pixels[: bar - 20], (0, 64, 160))
    assert 120 <= right - left + 1 <= 128  # the cell is 64 units of two pixels wide, minus the gap between cells
    cell = pixels[top : bottom + 1, left : right + 1]
    written = (cell != (0, 64, 160)).any(-1)
    assert 0.005 < written.mean() < 0.2  # a few pixels of the cell belong to the text "1.00"
    assert (cell[written].sum(-1) > 224).all()  # the text's pixels are lighter than the blue of the cell
    [(pale, *_)] = blocks(pixels[top : bottom + 1], (242, 245, 251))
    assert pale > right  # the cell of weight 0 is to the right and has no text
    beside = pixels[top : bottom + 1, right + 4 : right + 124]
    assert (beside == (242, 245, 251)).all()


def test_a_png_of_the_mean_is_the_mean(tmp_path):
    """The mean over the heads (1, 0) and (0, 1) is equal for both cells, so both have the same colour."""
    trace = Trace.from_weights({"x": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])}, rows=["r"], columns=["a", "b"])
    pixels = drawn_pixels(trace.png(tmp_path / "a.png", head="mean"))
    [(left, _, right, _)] = blocks(pixels[:-96], (0, 64, 160))
    assert 240 <= right - left + 1 <= 256  # both cells of the picture have the darkest colour


def test_long_names_of_a_png_are_not_cut_off_at_its_edges(tmp_path):
    names = ["a rather long name here"] * 9
    pixels = drawn_pixels(
        Trace.from_weights({"x": torch.eye(9)[None]}, rows=names, columns=names).png(tmp_path / "a.png")
    )
    for edge in (pixels[:, :8], pixels[:, -8:], pixels[:8], pixels[-8:]):
        assert (edge == 255).all()


def test_a_page_is_written_shown_and_framed(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    trace = Trace.from_weights({"cross": torch.rand(2, 3, 2)}, title='a "quoted" <title>')
    text = trace.html(tmp_path / "a.html").read_text()
    assert text.startswith("<!doctype html>")
    frame = trace._repr_html_().partition("</iframe>")[0]
    # The iframe has four attributes in quotation marks; quotation marks inside the embedded page are escaped.
    assert frame.count('"') == 8
    trace.show()
    [address] = opened
    assert address.startswith("file://")
    assert address.endswith("trace.html")


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_a_map_of_nothing_has_empty_summaries(queries, keys):
    record = Record("layer", "given", Given(torch.zeros(1, 2, queries, keys)))
    assert record.weights().shape == (2, queries, keys)
    assert record.overview(2, head=1).shape == (min(2, queries), min(2, keys))
    assert record.received().shape == (2, keys)
    assert record.entropy().shape == (2, queries)
    assert record.top(2).values.shape == (2, queries, min(2, keys))


@pytest.mark.parametrize("place", [0, slice(2), None])
def test_a_trace_is_indexed_by_names(as_installed, place):
    with pytest.raises(TypeError, match=r"indexed by a name or \(name, call\), got " + re.escape(repr(place))):
        Trace.from_weights({"layer": torch.eye(2)[None]})[place]


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_drawing_under_the_name_of_another_format_is_refused(tmp_path, form):
    trace = Trace.from_weights({"layer": torch.eye(2)[None]})
    with pytest.raises(ValueError, match=rf"{form} writes a \.{form} file, got .*map\.jpg"):
        getattr(trace, form)(tmp_path / "map.jpg")
    assert not list(tmp_path.iterdir())
    assert getattr(trace, form)(tmp_path / f"map.{form.upper()}").is_file()


@pytest.mark.parametrize(
    "write", [lambda trace, path: trace.html(path, titel="x"), lambda trace, _: trace.show(titel="x")]
)
def test_an_unknown_option_of_a_page_is_refused_by_name(tmp_path, write):
    with pytest.raises(TypeError, match=r"Trace\.(html|show)\(\) got an unexpected keyword argument 'titel'"):
        write(Trace.from_weights({"layer": torch.eye(2)[None]}), tmp_path / "page.html")


def test_labels_that_are_refused_leave_nothing_behind():
    trace = Trace.from_weights({"layer": torch.rand(1, 3, 4)})
    with pytest.raises(ValueError, match="columns has 1 labels"):
        trace.label(rows=["x", "y", "z"], columns=["bad"])
    assert trace["layer"].row_labels is None
