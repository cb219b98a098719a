"""Recordings: the same bytes however they are made, and a comparison that says what is wrong, and where.

Planted bugs are one-line mistakes in a copy of the product, which is recorded and compared.
"""
from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import golden
import mutations
import recordings
from convert import write_random
from golden_data import CHECKPOINT, DATA, IMAGE, RUNS
from golden_data import golden as golden_run
from recordings import Recording

ROOT = Path(golden.__file__).parent
Capture = pytest.CaptureFixture[str]
Copy = Callable[[Callable[[dict[str, Tensor]], None]], Path]


def tokens_file(folder: Path, run: str) -> Path:
    """The prompt of a golden run as a --tokens file."""
    arrays = golden_run(run)
    prompt: dict[str, Any] = {"tokens": arrays["tokens"][: int(arrays["prompt_length"])].tolist()}
    if run == "image":
        prompt["token_types"] = arrays["token_types"].tolist()
    path = folder / f"{run}.json"
    path.write_text(json.dumps(prompt))
    return path


def record_arguments(folder: Path, run: str, out: Path, decode: int) -> list[str]:
    images = ["--image", str(IMAGE)] if run == "image" else []
    return ["record", "--ckpt-path", str(CHECKPOINT), "--tokens", str(tokens_file(folder, run)), *images, "--decode",
            str(decode), "--device", "cpu", "--out", str(out)]


def record(folder: Path, run: str, name: str, *more: str, level: str = "all", decode: int | None = None) -> Path:
    arrays, out = golden_run(run), folder / f"{name}.safetensors"
    decode = len(arrays["tokens"]) - int(arrays["prompt_length"]) if decode is None else decode
    assert golden.main([*record_arguments(folder, run, out, decode), "--level", level, *more]) == 0
    return out


def compare(capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = golden.main(["compare", *map(str, arguments), "--json"])
    out = capsys.readouterr()
    return code, json.loads(out.out) if out.out else {"error": out.err}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def image_run(folder: Path) -> Path:
    """The golden image run, everything recorded."""
    return record(folder, "image", "image")


@pytest.fixture
def copy_of(image_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the image run with changed arrays, and no manifest."""
    def make(change: Callable[[dict[str, Tensor]], None]) -> Path:
        arrays = {name: t.clone() for name, t in load_file(image_run).items()}
        change(arrays)
        save_file({name: t.contiguous() for name, t in arrays.items()}, tmp_path / "b.safetensors")
        return tmp_path / "b.safetensors"
    return make


# ---------------------------------------------------------------------------------------------- the released recordings

def golden_map(run: str) -> dict[str, Any]:
    """The released recordings: runs are prefixes; the pool is a mask over rows; it and token_types stop at its end."""
    others, pools = "|".join({*RUNS, "engram"} - {run}), rf"{run}\.(layers\.\d+\.candidates)"
    rules: list[dict[str, Any]] = [{"from": pools, "to": r"\1", "do": [["blocks"]], "rows": "prompt"}]
    if run == "image":
        rules += [{"from": r"image\.(patches|vit|features|types)", "to": r"image.\1"},
                  {"from": r"image\.token_types", "to": "image.token_types", "do": [["squeeze"]], "rows": "prompt"}]
    return {"rules": [*rules, {"from": rf"{run}\.(.*)", "to": r"\1"}, {"from": rf"({others})\..*", "to": None}]}


@pytest.mark.parametrize("run", [pytest.param("text", marks=pytest.mark.long), "short", "image"])
def test_the_released_recordings_compare_equal(run: str, folder: Path, image_run: Path, tmp_path: Path,
                                               capsys: Capture) -> None:
    ours = image_run if run == "image" else record(folder, run, run, level="layers")
    (tmp_path / "map.json").write_text(json.dumps(golden_map(run)))
    code, report = compare(capsys, ours, DATA / "golden.safetensors", "--map", tmp_path / "map.json")
    with safe_open(DATA / "golden.safetensors", framework="pt") as file:
        released = [name for name in file.keys() if name.startswith(f"{run}.")]
    assert code == 0 and not report["notes"]
    assert len(report["tensors"]) == len(released) - 2    # tokens and prompt_length are looked at before
    assert {row["status"] for row in report["tensors"]} == {"equal"}


# ---------------------------------------------------------------------------------------------- same inputs, same bytes

@pytest.mark.parametrize("how", [("--chunk-size", "13"), ("--batch", "3", "--chunk-size", "50"), ("--speculative",),
                                 ("--speculative", "--batch", "2")], ids=" ".join)
def test_the_bytes_do_not_depend_on_how_they_were_computed(how: tuple[str, ...], image_run: Path, folder: Path) -> None:
    other = record(folder, "image", "other", *how)
    assert other.read_bytes() == image_run.read_bytes()


def test_filters_cut_out_the_same_rows(folder: Path, image_run: Path, capsys: Capture) -> None:
    part = record(folder, "image", "part", "--layers", "2,5-6", "--positions", "31:82", "--no-logits")
    whole, cut = load_file(image_run), load_file(part)
    layers = {name.split(".")[1] for name in cut if name.startswith("layers.")}
    assert layers == {"2", "5", "6"} and "logits" not in cut and cut["positions"].tolist() == list(range(31, 82))
    for name, rows in cut.items():
        if name == "positions" or name.startswith("image.") or name in ("tokens", "prompt_length"):
            continue
        first, last = (15, 41) if name in ("layers.2.main_kv", "layers.2.index_key") else (0, 4) if re.match(
            r"dspark\.(tokens|logits|confidence)", name) else (31, 82)
        assert torch.equal(rows, whole[name][first:last]), name
    code, report = compare(capsys, image_run, part)
    assert code == 0 and report["verdict"][0].startswith(f"equal: {len(report['tensors'])} of")


def test_shorter_ways_to_prefill_leave_out_what_they_do_not_compute(folder: Path, image_run: Path,
                                                                   capsys: Capture) -> None:
    bounded = record(folder, "image", "bounded", "--prefill", "bounded")
    arrays = load_file(bounded)
    assert arrays["layers.7.input"][: 78 - 16].isnan().all() and not arrays["layers.7.input"][78 - 16 :].isnan().any()
    assert (arrays["layers.7.topk"][: 78 - 16] == -1).all()
    code, report = compare(capsys, image_run, bounded)
    rows = {row["name"]: row for row in report["tensors"]}
    assert code == 1 and "prefill: full in A, bounded in B" in report["notes"]
    assert all(row["not_finite"] == 0 for row in rows.values())                     # what is not there is not compared
    assert rows["layers.4.output"]["status"] == rows["layers.5.main_kv"]["status"] == "equal"
    assert rows["layers.5.attention"]["status"] == "DIFFERENT"        # the window begins at the replayed tokens


def test_the_manifest_tells_the_facts(image_run: Path) -> None:
    facts = json.loads(recordings.manifest_path(image_run).read_text())
    assert facts["numerics"] == "exact" and facts["prompt_length"] == 78 and facts["decode"] == 6
    assert facts["tensor_parallel"] == 1 and all(facts["fake_quant"].values()) and len(facts["fake_quant"]) == 5
    assert facts["values_sha256"] == golden.file_digest(image_run) and len(facts["weights"]) == 64
    assert "--decode 6" in facts["command"] and facts["versions"]["torch"] == torch.__version__


def test_switches_are_recorded_and_change_what_they_switch(folder: Path, capsys: Capture) -> None:
    a = record(folder, "short", "on", "--no-draft", decode=2)
    b = record(folder, "short", "off", "--no-draft", "--fake-quant-off", "main_kv", decode=2)
    code, report = compare(capsys, a, b)
    assert code == 1 and report["causes"][0]["name"] == "layers.2.main_kv"
    assert any(note.startswith("fake_quant: ") for note in report["notes"])


def test_margins_are_the_gaps_at_the_cut(image_run: Path) -> None:
    arrays = load_file(image_run)
    visible = torch.arange(1, 85)
    for layer, m in ((2, 2), (5, 1), (7, 1), (9, 1)):
        free = (visible // m > 24) if layer < 6 else visible > 64
        margin = arrays[f"layers.{layer}.topk_margin"]
        assert margin.isinf().equal(~(visible // m > 24)), layer
        assert (margin[visible // m > 24] >= 0).all() and free.any()
    assert (arrays["layers.3.route_margin"] >= 0).all() and arrays["layers.3.route_margin"].isfinite().all()
    assert torch.equal(arrays["layers.3.route_margin"] * 2.0**20, (arrays["layers.3.route_margin"] * 2.0**20).round())


def test_nothing_is_left_behind_by_an_interrupted_recording(tiny: golden.Transformer, tmp_path: Path) -> None:
    def stop(recorder: golden.Recorder) -> Any:
        raise KeyboardInterrupt
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tiny.modules())
    with pytest.raises(KeyboardInterrupt):
        golden.record(tiny, golden.Prompt(torch.arange(20, 30)), tmp_path / "x.safetensors", around=[stop])
    assert not list(tmp_path.iterdir())
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tiny.modules())


def test_text_and_images_become_prompts() -> None:
    config = golden.ModelConfig.from_json(CHECKPOINT / "config.json")
    image = golden.load_image(IMAGE, config.vision_config)
    prompt = golden.expand([11, 9, 12], config, [image])
    assert prompt.tokens.tolist() == [11, *[9] * 17, 12] and prompt.types.tolist() == [-1, *image.span.tolist(), -1]
    assert golden.expand([11, 9], config, []).types is None          # without images the token is one like any other
    wrong = ([11], [image], None), ([9, 9], [image], None), ([9, 11], [image], [0, -1]), ([], [], None)
    for tokens, images, types in wrong:
        with pytest.raises(ValueError):
            golden.expand(tokens, config, images, types)


def test_prompts_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    files = []
    for name, source in (("a", ["--prompt", "Hi"]), ("b", ["--messages", str(tmp_path / "talk.json")]),
                         ("c", ["--raw", "--prompt", "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"])):
        out = tmp_path / f"{name}.safetensors"
        assert golden.main(["record", "--ckpt-path", str(CHECKPOINT), *source, "--level", "logits", "--device", "cpu",
                            "--out", str(out)]) == 0
        files.append(out.read_bytes())
    assert files[0] == files[1] == files[2]


# ------------------------------------------------------------------------------------------------------------- verdicts

def test_equal_files_are_equal(image_run: Path, copy_of: Copy, capsys: Capture) -> None:
    def widen(arrays: dict[str, Tensor]) -> None:      # another engine may have other types, and ids in any order
        for name, t in list(arrays.items()):
            if t.dtype == torch.bfloat16:
                arrays[name] = t.float()
            if name.endswith(("route_experts", "route_weights")):
                arrays[name] = t.flip(-1)
            if name.endswith("topk"):
                arrays[name] = t.long().flip(-1)
    code, report = compare(capsys, image_run, copy_of(widen))
    assert code == 0 and all(row["status"] == "equal" for row in report["tensors"])


def test_the_first_difference_is_named_and_the_rest_are_consequences(image_run: Path, copy_of: Copy,
                                                                    capsys: Capture) -> None:
    def change(arrays: dict[str, Tensor]) -> None:
        arrays["layers.3.ffn_out"][40, 7] *= 1.01
        arrays["layers.6.output"][41:] *= 1.01
        arrays["layers.8.attn_in"][30] *= 1.01          # earlier than the others: not a consequence
    code, report = compare(capsys, image_run, copy_of(change))
    assert code == 1 and not report["passed"]
    causes = [(row["name"], row["first_position"]) for row in report["causes"]]
    assert causes == [("layers.3.ffn_out", 40), ("layers.8.attn_in", 30)]
    assert "experts" in report["verdict"][0] and report["verdict"][-1].startswith("1 other")
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows["layers.3.ffn_out"]["bf16_ulps"] in (1, 2) and rows["layers.3.ffn_out"]["positions"] == 1
    assert rows["layers.6.output"]["positions"] == 84 - 41


def test_not_a_number_is_told_first(image_run: Path, copy_of: Copy, capsys: Capture) -> None:
    def change(arrays: dict[str, Tensor]) -> None:
        arrays["layers.4.ffn_in"][50, 3] = torch.nan
        arrays["layers.4.ffn_in"][51, 3] = torch.inf
    code, report = compare(capsys, image_run, copy_of(change))
    row = report["causes"][0]
    assert code == 1 and row["not_finite"] == 2 and row["first_position"] == 50 and row["max_abs"] == 0
    assert "2 elements are NaN or infinite on one side only" in report["verdict"][0]


@pytest.mark.parametrize("margin, tolerance, status", [
    (0.0, 0.0, "tie"), (0.25, 0.0, "DIFFERENT"), (0.25, 0.5, "near tie")])
def test_a_tie_is_called_a_tie(margin: float, tolerance: float, status: str, image_run: Path, copy_of: Copy,
                               tmp_path: Path, capsys: Capture) -> None:
    def with_margin(arrays: dict[str, Tensor]) -> None:
        arrays["layers.5.topk_margin"][60] = margin
    a = copy_of(with_margin).rename(tmp_path / "a.safetensors")
    facts = json.loads(recordings.manifest_path(image_run).read_text())
    facts["tolerances"] = {"free": {"layers.5.topk": {"margin": tolerance}}, "local": {}}
    recordings.manifest_path(a).write_text(json.dumps(facts))
    def swap(arrays: dict[str, Tensor]) -> None:
        with_margin(arrays)
        ids = arrays["layers.5.topk"][60]
        missing = sorted(set(range(61)) - set(ids.tolist()))[0]
        arrays["layers.5.topk"][60, 3] = missing
    code, report = compare(capsys, a, copy_of(swap))
    assert report["causes"][0]["status"] == status and report["causes"][0]["margin"] == margin
    assert code == (status == "DIFFERENT")
    assert ("a tie: the scores at the cut are equal" in report["verdict"][0]) == (status == "tie")


def test_another_token_ends_the_comparison(image_run: Path, copy_of: Copy, capsys: Capture) -> None:
    def change(arrays: dict[str, Tensor]) -> None:
        arrays["tokens"][80] = (arrays["tokens"][80] + 1) % 640
        for name, t in arrays.items():
            if name.startswith("layers.") and t.is_floating_point():
                t[len(t) - (2 if len(t) == 42 else 4) :] = 7          # layer 2 has one compressed row for two tokens
    code, report = compare(capsys, image_run, copy_of(change))
    assert code == 1 and "at position 80" in report["notes"][0] and "apart in A's logits" in report["notes"][0]
    assert all(row["status"] == "equal" for row in report["tensors"])


def test_other_prompts_and_shapes_are_refused(image_run: Path, copy_of: Copy, tmp_path: Path,
                                              capsys: Capture) -> None:
    def other_prompt(arrays: dict[str, Tensor]) -> None:
        arrays["tokens"][3] = 99
    def other_shape(arrays: dict[str, Tensor]) -> None:
        arrays["logits"] = arrays["logits"][:, :600]
    def other_names(arrays: dict[str, Tensor]) -> None:
        for name in list(arrays):
            arrays[f"x.{name}"] = arrays.pop(name)
    for change, words in ((other_prompt, "different prompts"), (other_names, "no array in common"),
                          (other_shape, "logits has rows [640] in A and [600] in B")):
        code, report = compare(capsys, image_run, copy_of(change))
        assert code == 1 and words in report["error"] and report["error"].count("\n") == 1
    for arguments, words in (([tmp_path / "none", tmp_path / "none"], "not a readable safetensors file"),
                             ([image_run, image_run, "--map", CHECKPOINT / "config.json"], "is not a map"),
                             ([DATA / "golden.safetensors", image_run], "holds no tokens")):
        code, report = compare(capsys, *arguments)
        assert code == 1 and words in report["error"]


@pytest.mark.long
def test_what_b_holds_in_part_is_told(image_run: Path, copy_of: Copy, capsys: Capture) -> None:
    def cut(arrays: dict[str, Tensor]) -> None:
        arrays["layers.3.attn_out"] = arrays["layers.3.attn_out"][:7]
        arrays["layers.4.attn_out"] = arrays["layers.4.attn_out"][:0]
    b = copy_of(cut)
    assert golden.main(["compare", str(image_run), str(b)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^layers\.3\.attn_out +84x\d+ +7 of 84 .* equal$", text, re.M)
    assert "\ncompared only in part: layers.3.attn_out (7 of 84), layers.4.attn_out (0 of 84)\n" in text
    assert text.endswith("\nPASSED on what B holds: 2 tensors in part\n")
    code, report = compare(capsys, image_run, b)
    assert code == 0 and len(report["compared_in_part"]) == 2
    code, report = compare(capsys, image_run, b, "--ckpt-path", CHECKPOINT)
    assert code == 0 and len(report["compared_in_part"]) == 2
    def fewer_patches(arrays: dict[str, Tensor]) -> None:
        arrays["image.vit"] = arrays["image.vit"][:5]
    code, report = compare(capsys, image_run, copy_of(fewer_patches), "--ckpt-path", CHECKPOINT)
    assert code == 0 and report["compared_in_part"][0].startswith("image.vit (5 of ")
    def drop(arrays: dict[str, Tensor]) -> None:      # a subset of the tensors is whole
        del arrays["layers.3.attn_out"]
    assert golden.main(["compare", str(image_run), str(copy_of(drop))]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\nPASSED\n") and "in part" not in text
    def double(arrays: dict[str, Tensor]) -> None:
        arrays["layers.3.attn_out"] = arrays["layers.3.attn_out"].repeat(2, 1)
    code, report = compare(capsys, image_run, copy_of(double))
    assert code == 1 and "layers.3.attn_out has 168 rows, its tokens make 84" in report["error"]


RUBBISH: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("layers.3.attn_out", lambda t: t.sum()), ("tokens", lambda t: t[0]), ("tokens", lambda t: t.float()),
    ("layers.2.route_experts", lambda t: t - 100), ("layers.5.candidates", lambda t: t + 1000),
    ("dspark.tokens", lambda t: t + 10**7), ("prompt_length", lambda t: t * 0 - 3), ("prompt_length", lambda t: t[:0]),
    ("layers.1.engram_rows", lambda t: t + 10**7), ("layers.3.window_kv", lambda t: t[:, :5]),
    ("layers.2.main_kv", lambda t: t[:, :5]), ("image.vit", lambda t: t[:, :5]),
    ("layers.3.route_weights", lambda t: t[:, :1])]


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rubbish_in_b_is_a_sentence(checkpoint: bool, image_run: Path, copy_of: Copy, capsys: Capture) -> None:
    more = ("--ckpt-path", CHECKPOINT) if checkpoint else ()
    for name, change in RUBBISH:
        code, report = compare(capsys, image_run, copy_of(lambda arrays: arrays.update({name: change(arrays[name])})),
                               *more)
        assert code == 1 and name in report["error"] and report["error"].count("\n") == 1, (name, report)


def test_rubbish_in_a_map_or_manifest_is_a_sentence(image_run: Path, copy_of: Copy, tmp_path: Path,
                                                    capsys: Capture) -> None:
    rule, path = {"from": "(logits)", "to": "logits"}, tmp_path / "map.json"
    for change, words in (({"do": [["view", "X"]]}, "logits cannot be read as logits: view wants one of"),
                          ({"do": [["slice", 0]]}, "logits cannot be read as logits"), ({"do": 3}, "logits cannot be"),
                          ({"to": "\\7"}, "the rule from '(logits)' cannot make a name"), ({"to": 7}, "(logits)"),
                          ({"rows": [1]}, "a map's rows are"),
                          ({"from": "step.*"}, "no rule of the map matches any of B's ")):
        path.write_text(json.dumps({"rules": [{**rule, **change}]}))
        code, report = compare(capsys, image_run, image_run, "--map", path)
        assert code == 1 and words in report["error"] and report["error"].count("\n") == 1, (change, report)
    b = copy_of(lambda arrays: None)
    for text in ("[]", '{"config": []}'):
        recordings.manifest_path(b).write_text(text)
        code, report = compare(capsys, image_run, b)
        assert code == 1 and "b.manifest.json is not a manifest" in report["error"]
    recordings.manifest_path(b).write_text('{"config": {"vocab_size": "x"}}')
    code, report = compare(capsys, image_run, b)
    assert code == 1 and report["error"].count("\n") == 1


def test_tables_are_rich_for_people_and_plain_in_a_pipe(image_run: Path, copy_of: Copy,
                                                        capsys: Capture) -> None:
    b = copy_of(lambda arrays: arrays["logits"][3, 5].add_(1))
    assert golden.main(["compare", str(image_run), str(b)]) == 1
    text = capsys.readouterr().out
    assert "\x1b" not in text and "│" not in text and text.rstrip().endswith("FAILED")
    assert re.search(r"^logits +84x640 .* DIFFERENT$", text, re.M)
    a = Recording(image_run)
    rich = recordings.result_table(recordings.compare(a, Recording(b, like=a)).results, pretty=True)
    assert "│" in rich and "\x1b[31mlogits" in rich
    for shown in (text, re.sub(r"\x1b\[\d*m", "", rich)):
        assert max(map(len, shown.splitlines())) <= 80
    # below a row that differs: where and by how much
    assert re.search(r"^logits .*\n    first +3  max abs +1  rel L2 \d\.\d\de-\d\d  ulps +\d+$", text, re.M)


def test_a_table_of_any_names_fits(capsys: Capture) -> None:
    names = ["tensor", "layers.20.candidates_margin", "step.0.model.layers.4.self_attn.indexer.topk_indices"]
    for pretty in (False, True):
        shown = recordings.table([[name, "1048576x4x5120", "400 of 65536", "98.760%"] for name in names], pretty, {1: "below"})
        lines = shown.splitlines()
        assert max(map(len, lines)) <= 80 and lines[-2] == names[-1] and lines[-1].split()[-1] == "98.760%"
        assert lines.index("below") == lines.index(next(line for line in lines if line.startswith(names[1]))) + 1


def test_a_plot_asks_for_matplotlib_in_a_sentence(image_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert golden.main(["compare", str(image_run), str(image_run), "--plot", str(tmp_path / "x.png")]) == 1
    assert capsys.readouterr().err == "error: --plot needs matplotlib: pip install matplotlib\n"


def test_a_plot_is_drawn(image_run: Path, copy_of: Copy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    b = copy_of(lambda arrays: arrays["layers.9.output"][3, 0].add_(1))
    assert golden.main(["compare", str(image_run), str(b), "--plot", str(tmp_path / "x.png")]) == 1
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------------------------------------------- other engines

def test_the_map_for_a_serving_engine(image_run: Path, tmp_path: Path, capsys: Capture) -> None:
    """What a serving engine's hooks give for the same run: tensors for each forward, other names and layouts."""
    ours, c, out = load_file(image_run), json.loads((CHECKPOINT / "config.json").read_text())["text_config"], {}
    steps = [(0, 50), (50, 78), *((p, p + 1) for p in range(78, 84))]      # a prompt in two chunks, then single tokens
    pad = torch.nn.functional.pad
    for n, (p0, p1) in enumerate(steps):
        def put(name: str, value: Tensor, n: int = n) -> None:
            out[f"step.{n}.{name}"] = value.clone()
        put("input_ids", ours["tokens"][p0:p1])
        put("model.norm.out", ours["final_hidden"][p0:p1])
        put("model.embed_tokens.out", ours["final_hidden"][p0:p1])
        if p1 >= 78:
            put("lm_head.out", ours["logits"][p1 - 1 : p1])
        for i in range(c["num_hidden_layers"]):
            x = {name.rpartition(".")[2]: t[p0:p1] for name, t in ours.items() if name.startswith(f"layers.{i}.")}
            p = f"model.layers.{i}."
            if i % 2:
                put(p + "in.hidden_states", x["input"].flatten(1))
            else:
                put(p + "in.residual", x["input"].transpose(0, 1))
            put(p + "in.pre_mix", x["pre_mix"])
            put(p + "out.hidden_states", x["output"].flatten(1))
            put(p + "input_layernorm.out", x["attn_in"])
            put(p + "self_attn.out", x["attn_out"])
            put(p + "self_attn.attn.in.q", pad(x["q"], (0, 0, 0, 2), value=torch.nan))           # heads padded to 8
            put(p + "self_attn.attn.out", pad(x["attention"], (0, 0, 0, 2)))
            put(p + "post_attention_layernorm.out", x["ffn_in"].float())
            put(p + "mlp.topk_ids", x["route_experts"].flip(-1))
            put(p + "mlp.topk_weights", x["route_weights"].flip(-1))
            put(p + "mlp.out", x["ffn_out"])
            if "topk" in x:
                put(p + "self_attn.indexer.topk_indices", x["topk"])
    save_file({name: t.contiguous() for name, t in out.items()}, tmp_path / "b.safetensors")
    code, report = compare(capsys, image_run, tmp_path / "b.safetensors", "--map", ROOT / "docs" / "vllm-map.json")
    assert code == 0 and not report["notes"] and not report["only_in_b"]
    assert len(report["tensors"]) == 11 * c["num_hidden_layers"] + 4 + 2
    assert {row["status"] for row in report["tensors"]} == {"equal"}
    out["step.1.model.layers.4.mlp.out"][9] += 1
    out["step.0.unknown"] = torch.zeros(1)
    save_file({name: t.contiguous() for name, t in out.items()}, tmp_path / "b.safetensors")
    code, report = compare(capsys, image_run, tmp_path / "b.safetensors", "--map", ROOT / "docs" / "vllm-map.json")
    assert code == 1 and [(r["name"], r["first_position"]) for r in report["causes"]] == [("layers.4.ffn_out", 59)]
    assert report["notes"] == ["1 tensors of B fit no rule of the map, such as step.0.unknown"]


def test_transforms_of_a_map() -> None:
    config = {"candidate_block_size": 3, "candidate_topk_blocks": 3, "hidden_size": 4}
    x = torch.arange(24)
    steps = [["reshape", -1, "hidden_size"], ["transpose", 1, 0], ["slice", 0, 1, 3]]
    assert recordings.transform(x, steps, config).tolist() == [[1, 5, 9, 13, 17, 21], [2, 6, 10, 14, 18, 22]]
    assert recordings.transform(torch.tensor([[[5, -1]]]), [["squeeze"], ["add", 2]], config).tolist() == [7, -1]
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, 4] = mask[1, 0] = mask[1, 7] = True
    assert recordings.transform(mask, [["blocks"]], config).tolist() == [[1, -1, -1], [0, 2, -1]]
    bits = torch.tensor([16256, 0], dtype=torch.int16)
    assert recordings.transform(bits, [["view", "BF16"]], config).tolist() == [1.0, 0.0]
    for steps in ([["fold"]], [["reshape", "no_such_size"]]):
        with pytest.raises(ValueError):
            recordings.transform(x, steps, config)


# ------------------------------------------------------------------------------------- causes, tolerances, planted bugs

# What the verdict has to say of the one-line mistakes in mutations.py: the first wrong array, and words about it.
ROTARY, IMAGES = "only in the channels that rotary turns", "only inside images"
START = "only where look-back meets the beginning or an image"
VERDICTS = {
    "a power of two for the main KV's scale": ("layers.2.main_kv", "FP4"),
    "rotary in halves instead of adjacent pairs": ("layers.0.q", ROTARY),
    "one theta for window-only layers and others": ("layers.0.q", ROTARY),
    "inverse rotation missing": ("layers.0.attn_out", "inverse rotary"),
    "pooled group rotated at its last token": ("layers.2.main_kv", ROTARY),
    "index key made from the rotated latent": ("layers.2.index_key", "un-rotated latent"),
    "window one position too long": ("layers.0.attention", "from the position on where the window is full"),
    "queries see what follows them": ("layers.0.attention", "window"),
    "softmax over channels instead of tokens": ("layers.2.main_kv", "pooling of a group"),
    "scores without ReLU": ("layers.2.topk", "scores"),
    "newest block not pinned": ("layers.5.candidates", "B lacks the newest block"),
    "candidate mask dropped": ("layers.7.topk", "selection of rows"),
    "a group visible before it is closed": ("layers.2.topk", "selection of rows"),
    "sink scaled like a score": ("layers.0.attention", "sink"),
    "a norm of every query head": ("layers.0.q", "queries"),
    "bias used as weight": ("layers.0.route_weights", "affinities without bias"),
    "bias_vl ignored": ("layers.0.route_experts", IMAGES),
    "routing weights not normalised": ("layers.0.route_weights", "normalised"),
    "up clamped from above only": ("layers.0.ffn_out", "limits"),
    "routing weight after a rounding of its own": ("layers.0.ffn_out", "routing weight"),
    "mixing matrix transposed": ("layers.0.output", "comb"),
    "experts read with the mix of attention": ("layers.0.ffn_in", "read with pre"),
    "Engram rows zeroed": ("layers.1.engram_out", "rows of the table"),
    "look-back goes on beyond an image": ("layers.1.engram_rows", IMAGES),
    "Engram adds at image tokens": ("layers.1.engram_out", IMAGES),
    "wrong pad in Engram": ("layers.1.engram_rows", START),
}
MUTATIONS = {mutation.name: (mutation.file, mutation.edits) for mutation in mutations.MUTATIONS}
MUTATIONS["wrong pad in Engram"] = "engram.py", (("int(token_map[config.engram_pad_token_id])", "7"),)
QUICK = ("newest block not pinned", "pooled group rotated at its last token")     # the others take a minute together
PRODUCT = [path.stem for path in ROOT.glob("*.py")]


@pytest.fixture(scope="module")
def bug_free(folder: Path) -> Path:
    return record(folder, "image", "bug_free", "--no-draft", decode=1)


def planted(bug: str, folder: Path, run: str = "image") -> Path:
    """Record with a copy of the product that has one mistake."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in PRODUCT:
        shutil.copy(ROOT / f"{name}.py", copy)
    file, edits = MUTATIONS[bug]
    source = (copy / file).read_text()
    for right, wrong in edits:
        assert source.count(right) == 1, f"{file} no longer has {right!r} once: change the mutation with it"
        source = source.replace(right, wrong)
    (copy / file).write_text(source)
    kept = {name: sys.modules.pop(name) for name in PRODUCT if name in sys.modules}
    sys.path.insert(0, str(copy))
    try:
        mutant = importlib.import_module("golden")
        out = folder / "mutant.safetensors"
        assert Path(mutant.__file__).parent == copy
        assert mutant.main([*record_arguments(folder, run, out, decode=1), "--no-draft", "--level", "all"]) == 0
    finally:
        sys.path.remove(str(copy))
        for name in PRODUCT:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
    return out


@pytest.mark.parametrize("bug", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in VERDICTS])
def test_the_verdict_names_a_planted_bug(bug: str, bug_free: Path, folder: Path, capsys: Capture) -> None:
    name, word = VERDICTS[bug]
    mutant = planted(bug, folder)
    code, report = compare(capsys, bug_free, mutant, "--ckpt-path", CHECKPOINT)
    assert code == 1 and report["causes"][0]["name"] == name
    assert word in report["verdict"][0] and report["verdict"][0].startswith("wrong by itself: " + name)
    assert "consequences" in report["verdict"][-1]
    wrong = {row["name"] for row in report["local"] if row["status"] == "DIFFERENT"}
    different = {row["name"] for row in report["tensors"] if row["status"] == "DIFFERENT"}
    assert len(wrong) < len(different) or wrong == different        # rows that a shut gate drops have no consequences
    code, report = compare(capsys, bug_free, mutant)                     # and without a checkpoint
    assert code == 1 and report["causes"][0]["name"] == name and word in report["verdict"][0]


@pytest.mark.long
def test_noise_gives_tolerances_that_pass_other_arithmetic_and_no_bug(folder: Path, capsys: Capture) -> None:
    exact = record(folder, "short", "exact", "--no-draft", decode=1)
    fast = record(folder, "short", "fast", "--fast", "--no-draft", decode=1)
    assert compare(capsys, exact, fast, "--ckpt-path", CHECKPOINT)[0] == 1    # without tolerances: equality
    capsys.readouterr()
    assert golden.main(["noise", str(exact), "--ckpt-path", str(CHECKPOINT), "--runs", "1"]) == 0
    values, ids, _ = capsys.readouterr().out.split("\n\n")
    assert max(map(len, [*values.splitlines(), *ids.splitlines()])) <= 80
    assert re.search(r"^layers\.3\.attn_out( +[\d.e-]+){4}$", values, re.M)
    assert re.search(r"^layers\.5\.topk( +\S+){2}$", ids, re.M)
    found = json.loads(recordings.manifest_path(exact).read_text())["tolerances"]
    assert 0 < found["local"]["layers.3.attn_out"]["rel_l2"] < 0.01 < found["free"]["layers.9.output"]["rel_l2"]
    code, report = compare(capsys, exact, fast, "--ckpt-path", CHECKPOINT)
    assert code == 0 and not report["causes"]
    wrong = planted("sink scaled like a score", folder, "short")
    code, report = compare(capsys, exact, wrong, "--ckpt-path", CHECKPOINT)
    assert code == 1 and report["causes"][0]["name"] == "layers.0.attention"


# ----------------------------------------------------------------------------------------------------------------- show

def test_show(image_run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert golden.main(["show", str(image_run)]) == 0
    text = capsys.readouterr().out
    assert "84 tokens, 78 of them the prompt" in text and "numerics: exact" in text
    assert re.search(r"^layers\.5\.topk +int32 +84x24 +-\n +-1 to 83 +mean +\d+\.\d+  rms +\d+\.\d+$", text, re.M)
    assert max(len(line) for line in text.splitlines() if not line.startswith(("  command: ", str(image_run)))) <= 80
    assert golden.main(["show", str(image_run), "--layer", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "positions 0 to 83 downwards, rows 0 to 83" in lines[0]
    assert max(map(len, lines)) <= 80
    assert lines[1].strip() and len(lines[1].rstrip()) < len(lines[-1].rstrip())     # nobody selects what comes later
    assert golden.main(["show", str(image_run), "--layer", "5", "--picture", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert golden.main(["show", str(image_run), "--layer", "3"]) == 1
    assert "layers.3.topk" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", [
    (["--tokens", "none.json"], "none.json is not a readable JSON file"),
    (["--prompt", "x", "--layers", "77"], "not all among the 10"),
    (["--prompt", "x", "--layers", "a"], "--layers wants"),
    (["--prompt", "x", "--positions", "900:901"], "not within"),
    (["--prompt", "x", "--fake-quant-off", "kv"], "is not one of"),
    (["--prompt", "x", "--image", "none.png"], "none.png"),
    (["--prompt", "x", "--decode", "-1"], "nothing to record"), (["--prompt", "x", "--bogus"], "--bogus"),
    (["--prompt", "x", "--decode", "y"], "argument --decode: invalid int value: 'y'")])
def test_bad_input_is_a_sentence(arguments: list[str], words: str, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "x.safetensors")
    assert golden.main(["record", "--ckpt-path", str(CHECKPOINT), "--device", "cpu", "--out", out, *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not list(tmp_path.glob("x*"))


def test_a_recording_may_go_beyond_the_context(tmp_path: Path, capsys: Capture) -> None:
    tokens = torch.randint(20, 500, (514,), generator=torch.Generator().manual_seed(1))
    (tmp_path / "ids.json").write_text(json.dumps(tokens.tolist()))
    out = tmp_path / "x.safetensors"
    assert golden.main(["record", "--ckpt-path", str(CHECKPOINT), "--device", "cpu", "--fast", "--tokens",
                        str(tmp_path / "ids.json"), "--decode", "1", "--level", "logits", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "note: 515 tokens are more than the model's context of 512 (max_position_embeddings)\n" in said
    logits = load_file(out)["logits"]
    assert logits.shape[0] == 515 and logits.isfinite().all()


def test_image_tokens_without_images_are_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "ids.json").write_text("[11, 9, 12]")
    assert golden.main(["record", "--ckpt-path", str(CHECKPOINT), "--device", "cpu", "--tokens",
                        str(tmp_path / "ids.json"), "--out", str(tmp_path / "x.safetensors")]) == 1
    assert "0 images are given for 1 image tokens 9 in the prompt" in capsys.readouterr().err


def test_a_recording_takes_the_place_of_recordings_only(image_run: Path, tmp_path: Path, capsys: Capture) -> None:
    notes, foreign = tmp_path / "notes.txt", tmp_path / "foreign.safetensors"
    notes.write_text("mine")
    save_file({"weight": torch.zeros(2)}, foreign)
    for out, words in ((tmp_path, "is a directory"), (notes, "is not a recording"), (foreign, "is not a recording")):
        assert golden.main(["record", "--ckpt-path", str(CHECKPOINT), "--device", "cpu", "--prompt", "x", "--out",
                            str(out)]) == 1
        error = capsys.readouterr().err
        assert f"{out} " in error and words in error and error.count("\n") == 1
    assert notes.read_text() == "mine"
    golden.check_out(image_run)


# ---------------------------------------------------------------------------------------------------------- larger runs

def random_tokens(n: int, path: Path) -> str:
    path.write_text(json.dumps(torch.randint(11, 600, (n,), generator=torch.Generator().manual_seed(1)).tolist()))
    return str(path)


@pytest.mark.long
def test_two_ranks_record_the_same_bytes(tmp_path: Path) -> None:
    write_random(Path(__file__).parent / "configs" / "parallel.json", tmp_path / "model", 7, CHECKPOINT)
    tokens, digests = random_tokens(70, tmp_path / "tokens.json"), []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.safetensors"
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                        str(ROOT / "golden.py"), "record", "--ckpt-path", str(tmp_path / "model"), "--tokens", tokens,
                        "--decode", "3", "--level", "all", "--device", "cpu", "--out", str(out)], check=True)
        digests.append(golden.file_digest(out))
    assert digests[0] == digests[1]


@pytest.mark.gpu
def test_a_gpu_records_the_same_bytes(folder: Path, image_run: Path) -> None:
    other = record(folder, "image", "gpu", "--device", "cuda")
    assert other.read_bytes() == image_run.read_bytes()


@pytest.mark.manual
def test_a_long_recording_does_not_need_memory(tmp_path: Path) -> None:
    """65,536 tokens, all of two layers: measured 0.6 GiB of memory, 5 minutes of one core, a file of 0.9 GiB."""
    n = 65536
    tokens, out = random_tokens(n, tmp_path / "tokens.json"), tmp_path / "x.safetensors"
    model = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = n          # made for 512
    (model / "config.json").write_text(json.dumps(config))
    program = ("import resource, sys, torch; torch.set_num_threads(1); import golden; code = golden.main(sys.argv[1:]);"
               "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)")
    done = subprocess.run([sys.executable, "-c", program, "record", "--ckpt-path", str(model), "--tokens", tokens,
                           "--device", "cpu", "--level", "all", "--layers", "5,7", "--out", str(out)],
                          check=True, capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout.split()[-1]) < 2 << 20       # KiB
    assert Recording(out).shape("layers.5.q") == [n, 6, 64]
