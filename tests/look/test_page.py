"""Tests of the page as a file: its contents, the accuracy of its numbers, and what it must not contain."""

import base64
import gzip
import json
import math
import re

import pytest
import torch

from regard.look.attention_records import Given, Record
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.look.viewer.page import FOLDER, bundle, page
from regard.look.viewer.page_data import COARSE, FINE, KEPT, KEPT_WEIGHTS, WHOLE, Budget, about, pack, pictures


def softmax(*shape: int) -> torch.Tensor:
    return (2 * torch.randn(shape)).softmax(-1)


def unpacked(entry: dict, heads: int, data: bytes) -> dict[str, torch.Tensor]:
    """Return the attention maps of one layer, decoded from the page as viewer/assets/source.js documents, without the
    mean over the heads."""
    found = with_mean(entry, data)
    share = {name: len(array) // entry["pack"]["heads"] * heads for name, array in found.items()}
    return {name: array[: share[name]] for name, array in found.items()}


def with_mean(entry: dict, data: bytes) -> dict[str, torch.Tensor]:
    raw, start, found = gzip.decompress(data), 0, {}
    pack = entry["pack"]
    heads = pack["heads"]
    rows = heads * pack["rowsKept"]
    for name, dtype, count in (
        ("steps", torch.float32, heads * pack["mapRows"]),
        ("rests", torch.float32, rows),
        ("received", torch.float32, heads * pack["keys"]),
        ("indices", torch.uint16, rows * pack["kept"]),
        ("largest", torch.uint16, rows * pack["kept"]),
        ("codes", torch.uint8, heads * pack["mapRows"] * pack["mapColumns"]),
    ):
        found[name] = torch.frombuffer(bytearray(raw), dtype=dtype, count=count, offset=start)
        start += -(-count * dtype.itemsize // 4) * 4
    assert start == len(raw)
    return found


def rebuilt(entry: dict, heads: int, data: bytes) -> torch.Tensor:
    """Return the weights of a record as the page restores them from its 8-bit and 16-bit numbers."""
    arrays, pack = unpacked(entry, heads, data), entry["pack"]
    shape = (heads, pack["queries"], pack["keys"])
    values = arrays["codes"].reshape(shape).float() * arrays["steps"].reshape(heads, -1, 1)
    indices = arrays["indices"].to(torch.int64).reshape(*shape[:2], -1)
    return values.scatter(-1, indices, arrays["largest"].float().reshape(indices.shape) / 65535 * pack["peak"])


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 11, 61), (1, 1, 2), (2, 67, 13)])
def test_stored_weights_are_within_the_error_that_is_told(shape):
    weights = softmax(*shape)
    packed = pack(Trace.from_weights({"layer": weights}))
    [entry] = packed.about["records"]
    seen = rebuilt(entry, shape[0], packed.records[0])
    assert float((seen - weights).abs().max()) <= entry["pack"]["error"] * 1.001
    assert entry["pack"]["error"] < 0.0005  # each weight that the page shows is correct to three decimals
    best = weights.topk(min(KEPT, shape[-1]), -1)
    torch.testing.assert_close(seen.gather(-1, best.indices), best.values, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_many_weights_are_kept_in_coarser_steps_that_still_have_three_decimals():
    weights = softmax(17, 487, 491)
    trace = Trace.from_weights({"layer": weights})
    assert weights.numel() > FINE
    assert Budget.of([trace]).step == COARSE
    packed = pack(trace)
    [entry] = packed.about["records"]
    assert float((rebuilt(entry, 17, packed.records[0]) - weights).abs().max()) < 0.0005


def test_weights_that_do_not_sum_to_one_are_told_with_their_larger_error():
    weights = torch.rand(2, 3, 41) * 5
    packed = pack(Trace.from_weights({"gates": weights}))
    [entry] = packed.about["records"]
    seen = rebuilt(entry, 2, packed.records[0])
    assert 0.005 < entry["pack"]["error"] < 0.02
    assert float((seen - weights).abs().max()) <= entry["pack"]["error"] * 1.001


def test_empty_rows_stay_empty():
    weights = softmax(2, 5, 29)
    weights[:, 3] = 0
    packed = pack(Trace.from_weights({"layer": weights}))
    assert not rebuilt(packed.about["records"][0], 2, packed.records[0])[:, 3].any()


def test_a_long_map_is_pooled_and_keeps_the_largest_of_each_row():
    weights = softmax(2, 3, WHOLE + 89)
    packed = pack(Trace.from_weights({"layer": weights}))
    [entry] = packed.about["records"]
    assert entry["pack"]["whole"] is False
    arrays = unpacked(entry, 2, packed.records[0])
    kept = entry["pack"]["kept"]
    best = weights.topk(kept, -1)
    assert arrays["indices"].tolist() == best.indices.flatten().tolist()
    largest = arrays["largest"].float() / 65535 * entry["pack"]["peak"]
    torch.testing.assert_close(largest, best.values.flatten(), atol=1e-5, rtol=0)
    torch.testing.assert_close(arrays["rests"], 1 - best.values.sum(-1).flatten(), atol=1e-4, rtol=0)
    cells = arrays["codes"].reshape(2, 3, -1).float() * arrays["steps"].reshape(2, 3, 1)
    column = torch.arange(WHOLE + 89) * cells.shape[-1] // (WHOLE + 89)
    error = entry["pack"]["error"] * 1.001
    assert error < 0.0005
    for cell in (0, 17, cells.shape[-1] - 1):  # each cell of a pooled map is the mean of the weights that it covers
        torch.testing.assert_close(cells[..., cell], weights[..., column == cell].mean(-1), atol=error, rtol=0)


def test_what_is_left_of_gates_is_their_own_sum():
    weights = torch.rand(1, 2, WHOLE + 1)
    packed = pack(Trace.from_weights({"gates": weights}))
    [entry] = packed.about["records"]
    rests = unpacked(entry, 1, packed.records[0])["rests"]
    best = weights.topk(entry["pack"]["kept"], -1).values
    torch.testing.assert_close(rests, (weights.sum(-1) - best.sum(-1)).flatten(), rtol=1e-4, atol=1e-3)


def test_a_saved_trace_that_kept_the_largest_only_says_what_the_rest_comes_to(tmp_path):
    weights = softmax(1, 600, 600)
    trace = Trace.load(Trace.from_weights({"layer": weights}).save(tmp_path / "t.safetensors", whole=1000))
    packed = pack(trace)
    [entry] = packed.about["records"]
    arrays = unpacked(entry, 1, packed.records[0])
    best = weights.topk(entry["pack"]["kept"], -1).values.sum(-1).flatten()
    torch.testing.assert_close(arrays["rests"], 1 - best, atol=5e-3, rtol=0)
    torch.testing.assert_close(arrays["received"], weights[0].mean(0), atol=1e-4, rtol=0)
    assert entry["distance"] is None
    assert "largest weights were saved" in entry["note"]


def test_so_many_long_rows_that_only_some_are_kept():
    trace = Trace.from_weights({f"layer{n}": softmax(97, 2, 3) for n in range(2)})
    for record in trace.records:
        # The budget depends on the sizes of the records alone; no weights are computed.
        record.queries = record.keys = 100_000
    budget = Budget.of([trace])
    assert budget.stride == -(-4 * 2 * 98 * 100_000 // KEPT_WEIGHTS)  # each record has 98 maps: 97 heads and their mean
    assert budget.kept == 4
    assert 64 <= budget.side <= 256


def test_entropy_and_distance_by_hand():
    uniform, ahead = torch.full((5, 5), 0.2), torch.eye(5).roll(1, 0)
    packed = pack(Trace.from_weights({"layer": torch.stack([uniform, torch.eye(5), ahead])}))
    [entry] = packed.about["records"]
    # The last head is the mean of the three others: each row has 0.4 on the diagonal and at the position before it, and
    # 0.0667 at the three other positions.
    mean = -2 * 0.4 * math.log(0.4) - 3 * 0.2 / 3 * math.log(0.2 / 3)
    assert entry["entropy"] == pytest.approx([1.609, 0, 0, mean], abs=1e-3)
    # The distance of the uniform head is the mean of |i − j| over the 5 × 5 positions. In the third head, each row
    # attends to the position before it, and the first row attends to the last position.
    assert entry["distance"] == pytest.approx([1.6, 0, (4 + 4) / 5, (1.6 + 0 + 1.6) / 3], abs=1e-3)


def test_the_mean_over_heads_is_packed_behind_them():
    weights = softmax(3, 5, 7)
    packed = pack(Trace.from_weights({"layer": weights}))
    [entry] = packed.about["records"]
    assert (entry["heads"], entry["pack"]["heads"]) == (3, 4)
    seen = rebuilt(entry, 4, packed.records[0])
    torch.testing.assert_close(seen[3], weights.sum(0) / 3, atol=5e-4, rtol=0)


def test_one_head_has_no_mean_beside_it():
    packed = pack(Trace.from_weights({"layer": softmax(1, 2, 3)}))
    assert packed.about["records"][0]["pack"]["heads"] == 1


def thumbnails(packed) -> list[torch.Tensor]:
    """Return the thumbnails of each record as weights, decoded as in viewer/assets/source.js."""
    raw = gzip.decompress(base64.b64decode(packed.about["thumbnails"]))
    found = []
    for entry in packed.about["records"]:
        place, heads = entry["thumbnails"], entry["pack"]["heads"]
        count = heads * math.prod(place["shape"])
        dtype = torch.float16 if place["half"] else torch.uint8
        roots = torch.frombuffer(bytearray(raw), dtype=dtype, count=count, offset=place["start"]).float()
        roots = (roots if place["half"] else roots / 255).reshape(heads, *place["shape"])
        found.append(roots.sign() * roots**2 * torch.tensor(place["peaks"])[:, None, None])
    return found


def test_small_maps_have_weights_so_that_heads_can_share_a_scale():
    uniform, sharp = torch.full((5, 5), 0.2), torch.eye(5)
    [small] = thumbnails(pack(Trace.from_weights({"layer": torch.stack([uniform, sharp])})))
    torch.testing.assert_close(small[0], uniform, atol=2e-3, rtol=0)
    torch.testing.assert_close(small[1], sharp, atol=1e-6, rtol=0)
    # The third thumbnail is the mean of the two heads.
    torch.testing.assert_close(small[2], (uniform + sharp) / 2, atol=5e-3, rtol=0)


def test_a_cell_of_a_small_map_is_the_largest_weight_in_it():
    weights = torch.full((1, 96, 64), 1e-3)
    # In cells of 3 rows and 2 columns, row 4 is in cell row 1 and column 63 in the last cell column.
    weights[0, 4, 63] = 0.75
    [small] = thumbnails(pack(Trace.from_weights({"layer": weights})))
    assert small.shape == (1, 32, 32)
    assert float(small[0, 1, 31]) == pytest.approx(0.75, abs=1e-3)
    assert int((small > 0.01).sum()) == 1


def test_a_cell_of_a_small_map_that_has_nan_or_a_negative_weight_says_so():
    weights = torch.full((1, 64, 64), 0.25)
    weights[0, 0, 0], weights[0, 63, 63] = math.nan, -0.5
    [small] = thumbnails(pack(Trace.from_weights({"layer": weights})))
    assert math.isnan(small[0, 0, 0])
    assert float(small[0, 31, 31]) == pytest.approx(-0.5, abs=1e-3)
    assert float(small[0, 5, 5]) == pytest.approx(0.25, abs=1e-3)


def records_of(text: str) -> list[dict]:
    [data] = re.findall(r'data-about="0-0">([^<]*)<', text)
    return json.loads(base64.b64decode(data))["records"]


def test_a_page_has_the_rollout_of_each_stack():
    names = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    names += [f"decoder.layers.{n}.{kind}" for n in range(2) for kind in ("self_attn", "multihead_attn")]
    found = records_of(page(Trace.from_weights({name: softmax(2, 5, 5) for name in names})))
    assert [entry["layer"] for entry in found[6:]] == [["encoder", "rollout"], ["decoder", "self", "rollout"]]


def test_what_does_not_fit_one_stack_has_no_rollout():
    found = page(Trace.from_weights({"layers.0.attention": softmax(1, 5, 5), "layers.1.attention": softmax(1, 5, 7)}))
    assert [entry["kind"] for entry in records_of(found)] == ["given", "given"]


def test_distance_needs_rows_and_columns_of_one_kind():
    cross = Trace.from_weights({"layer": softmax(1, 2, 2)}, rows=["le", "chat"], columns=["the", "cat"])
    assert pack(cross).about["records"][0]["distance"] is None
    cached = Trace.from_weights(
        {"layer": torch.tensor([[[0, 0, 1.0, 0], [1.0, 0, 0, 0]]])}, rows=["c", "d"], columns=list("abcd")
    )
    assert pack(cached).about["records"][0]["distance"] == pytest.approx([(0 + 3) / 2])


def test_labels_are_told_once_with_what_places_them():
    objects = Labels(
        "objects", ("ego", "truck"), {"x": [0, 20], "y": [0.0, 3.5], "heading": [0, 0.1], "speed": [25, 18]}
    )
    trace = Trace.from_weights({"a": softmax(1, 1, 2), "b": softmax(1, 1, 2)}, columns=objects)
    found = about(trace)
    assert [record["columns"] for record in found["records"]] == [0, 0]
    assert found["labels"] == [
        {
            "kind": "objects",
            "items": ["ego", "truck"],
            "picture": False,
            "x": [0.0, 20.0],
            "y": [0.0, 3.5],
            "heading": [0.0, 0.1],
            "speed": [25.0, 18.0],
        }
    ]


def test_pictures_of_labels():
    patches = Labels("patches", ("a", "b"), {"image": b"\x89PNG", "grid": (1, 2)})
    trace = Trace.from_weights({"a": softmax(1, 3, 2)}, rows=["x", "y", "z"], columns=patches)
    assert pictures(trace) == {"1": b"\x89PNG"}
    assert about(trace)["labels"][1]["grid"] == [1, 2]


def test_of_a_batch_one_sequence_is_shown_and_the_note_says_which():
    weights = softmax(3, 2, 5, 7)
    packed = pack(Trace.from_weights({"layer": weights}), batch=1)
    [entry] = packed.about["records"]
    assert "Sequence 1 of a batch of 3 is shown." in entry["note"]
    torch.testing.assert_close(rebuilt(entry, 2, packed.records[0]), weights[1], atol=5e-4, rtol=0)


def test_the_page_has_no_text_of_the_trace_outside_its_data_but_the_escaped_title():
    evil = "<img src=x onerror=alert(1)>"
    trace = Trace.from_weights({evil: softmax(1, 2, 2)}, title=f"</title>{evil}", rows=[evil, "</script>"])
    text = page(trace)
    assert evil not in text
    assert "</title>&lt;img" not in text
    assert "&lt;/title&gt;&lt;img src=x onerror=alert(1)&gt;" in text
    [data] = re.findall(r'<script type="text/plain" data-about="0-0">([^<]*)</script>', text)
    assert json.loads(base64.b64decode(data))["labels"][0]["items"] == [evil, "</script>"]


def test_the_page_asks_for_nothing_and_forbids_asking():
    text = page(Trace.from_weights({"layer": softmax(1, 2, 3)}))
    assert "default-src 'none'" in text
    assert "connect-src" not in text  # without the directive, default-src applies, which allows no connections
    script = re.sub(r"(default|script|style)-src", "", text)
    assert not re.findall(
        r"src=|url\([^#]|import\(|@import|//cdn|https:|eval\(|(inner|outer|Adjacent)HTML|\.write\(", script
    )


def test_modules_can_be_served_as_they_are():
    """The studio's security policy forbids inline scripts: modules have no event handler attributes and no eval."""
    for path in FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"innerHTML|eval\(|new Function", text), path.name
        for line in re.findall(r"^import .*$", text, re.MULTILINE):
            assert re.fullmatch(r'import \{[^}]+\} from "\./\w+\.js";', line), line
        assert not re.findall(r"^export (?!async function|function|class|const|let)", text, re.MULTILINE), path.name


def test_the_bundle_has_every_module_once_and_none_left_to_import():
    script = bundle()
    names = re.findall(r'^modules\["([\w.]+)"\] = ', script, re.MULTILINE)
    assert sorted(names) == sorted(path.name for path in FOLDER.glob("*.js"))
    assert names[-1] == "main.js"
    assert not re.findall(r"^(import|export) ", script, re.MULTILINE)


def test_both_languages_have_every_word():
    text = (FOLDER / "strings.js").read_text(encoding="utf-8")
    english, chinese = (
        set(re.findall(r"(\w+): \"", block)) for block in re.findall(r"const \w\w = \{(.*?)\n\};", text, re.DOTALL)
    )
    assert english == chinese
    asked = {
        name for path in FOLDER.glob("*.js") for name in re.findall(r'say\("(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert asked <= english


def test_colours_are_those_of_the_drawings():
    """The constants of the colour scale are the same in Python (for drawings) and in JavaScript (for the page)."""
    from regard.look.color_scale import DARK, LIGHT

    text = (FOLDER / "colors.js").read_text(encoding="utf-8")
    for name, scale in (("light", LIGHT), ("dark", DARK)):
        [low, high, pale, full] = re.search(
            name + r": \{ lightness: \[([\d.]+), ([\d.]+)\], chroma: \[([\d.]+), ([\d.]+)\]", text
        ).groups()
        assert (float(low), float(high)) == scale.lightness
        assert (float(pale), float(full)) == scale.chroma


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"language": "fr"}, "language must be one of en, zh, got 'fr'"),
        ({"batch": -1}, "batch must be from 0 to 0, as there is 1 sequence, got -1"),
    ],
)
def test_wrong_options_are_refused(options, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        page(Trace.from_weights({"layer": softmax(1, 2, 2)}), **options)


def test_one_trace_or_two():
    trace = Trace.from_weights({"layer": softmax(1, 2, 2)}, title="one")
    assert page([trace, trace]).count("data-about=") == 2
    with pytest.raises(ValueError, match="one trace or two side by side, got 3"):
        page([trace] * 3)
    with pytest.raises(ValueError, match="got 0"):
        page([])


def test_steps_of_generation_are_one_map():
    steps = [softmax(1, 1, 3, 3), softmax(1, 1, 1, 4), softmax(1, 1, 1, 5)]
    trace = Trace("generated", [Record("decoder", "sdpa", Given(step), call=n) for n, step in enumerate(steps)])
    [data] = re.findall(r'data-about="0-0">([^<]*)<', page(trace))
    [entry] = json.loads(base64.b64decode(data))["records"]
    assert (entry["queries"], entry["keys"]) == (5, 5)


def test_calls_with_names_of_their_own_stay_apart():
    trace = Trace("two", [Record("decoder", "sdpa", Given(softmax(1, 1, 1, 3)), call=n) for n in range(2)])
    assert (
        page(trace.label(columns=["a", "b", "c"])).count("data-record=")
        == page(Trace("two", trace.records[:1])).count("data-record=") + 1
    )


def test_pages_stay_small():
    """A page with twelve layers of twelve heads over 32 tokens has less than 1 MB; the page of bertviz has 6.4 MB."""
    trace = Trace.from_weights({f"layer.{n}": softmax(12, 32, 32) for n in range(12)})
    assert len(page(trace)) < 1_000_000


@pytest.mark.parametrize(("size", "there"), [(100, True), (2**20 + 1, False), (0, False)])
def test_a_page_has_the_sound_of_its_frames_up_to_a_size(size, there):
    frames = Labels("frames", ("0.00 s", "0.04 s"), {"seconds": 0.04, "sound": b"\1" * size})
    labels = about(Trace.from_weights({"layer": softmax(1, 3, 2)}, columns=frames))["labels"]
    assert labels[0].get("sound") == (base64.b64encode(b"\1" * size).decode() if there else None)
