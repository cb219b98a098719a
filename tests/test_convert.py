"""Checkpoints: the schema against headers that other programs wrote, refusals, shards, random weights, loading."""
from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import convert
import twin
from convert import checkpoint_schema, load_model, open_checkpoint, weights_digest, write_random, write_shards
from dspark import DSpark
from golden_data import CHECKPOINT, same_bits
from model import ModelConfig, Transformer
from quant import Numerics, Ranks, dequantise_weight

ROOT = Path(convert.__file__).parent
CUT = ["--hf-ckpt-path"]
PARALLEL = Path(__file__).parent / "configs" / "parallel.json"  # vision, Engram and drafts; its sizes divide by 4


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by the safetensors library."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("parallel") / "checkpoint"
    write_random(PARALLEL, target, 5, CHECKPOINT)
    return target


@pytest.fixture(scope="module")
def shards4(parallel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("shards") / "4"
    write_shards(parallel, target, 4)
    return target


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tiny checkpoint to spoil."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "copy"))


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    """A stand-in for a process group: loading asks a group for nothing but its rank and size."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
    return lambda rank, size: SimpleNamespace(rank=rank, size=size)


# ------------------------------------------------------------------------------------------------------------- schema

def test_schema_of_the_released_configuration() -> None:
    schema = checkpoint_schema(ModelConfig.from_json(ROOT / "config.json"))
    assert Counter(spec.dtype for spec in schema.values()) == {
        "BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232}
    assert len(schema) == 96_085 and sum(spec.nbytes for spec in schema.values()) == 510_286_023_000


def test_schema_equals_the_headers_of_a_published_checkpoint() -> None:
    found = {}
    for path in CHECKPOINT.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                header = file.get_slice(name)
                found[name] = header.get_dtype(), tuple(header.get_shape())
    schema = checkpoint_schema(ModelConfig.from_json(CHECKPOINT / "config.json"))
    assert {name: (spec.dtype, spec.shape) for name, spec in schema.items()} == found


def test_schema_without_vision_has_no_image_tensor() -> None:
    published = json.loads(PARALLEL.read_text())
    with_vision = checkpoint_schema(ModelConfig.from_dict(published))
    del published["vision_config"]
    without = checkpoint_schema(ModelConfig.from_dict(published))
    gone = {name for name in with_vision if re.match(r"vision|aligner|image_", name) or name.endswith("bias_vl")}
    assert set(with_vision) - set(without) == gone and gone


@pytest.mark.parametrize("source, size", [("config.json", 1), ("config.json", 8), ("tests/configs/parallel.json", 4)])
def test_parameters_on_the_meta_device_equal_the_schema(source: str, size: int) -> None:
    config = ModelConfig.from_json(ROOT / source)
    rank = size - 1
    with torch.device("meta"):
        model = Transformer(config, Numerics(), Ranks(rank, size), DSpark(config, Numerics(), Ranks(rank, size)))
    found = {}
    for name, parameter in model.named_parameters():
        if ".ffn.experts." in name:
            for e in range(len(parameter)):
                found[convert.checkpoint_name(name, rank * len(parameter) + e)] = (parameter.dtype, parameter.shape[1:])
        else:
            found[convert.checkpoint_name(name)] = (parameter.dtype, parameter.shape)
    schema = convert.rank_schema(config, rank, size)
    assert found == {name: (convert.DTYPES[spec.dtype], spec.shape) for name, spec in schema.items()}


# ---------------------------------------------------------------------------------------------------- check, refusals

def test_check_prints_totals(capsys: pytest.CaptureFixture[str], shards4: Path) -> None:
    assert convert.main(["--check", str(CHECKPOINT)]) == 0
    out = capsys.readouterr().out
    assert "published layout, 3 files" in out and re.search(r"F8_E8M0 +338 tensors +114,216 bytes", out)
    assert re.search(r"total +909 tensors +6,840,112 bytes", out)
    assert convert.main(["--check", str(ROOT / "config.json")]) == 0
    assert re.search(r"total +96,085 tensors +510,286,023,000 bytes", capsys.readouterr().out)
    assert convert.main(["--check", str(shards4)]) == 0
    assert "shards for 4 ranks, 4 files" in capsys.readouterr().out


def rewrite(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Change the tensors of the file that the index names for `name`."""
    def spoil(directory: Path) -> None:
        file = directory / json.loads((directory / convert.INDEX).read_text())["weight_map"][name]
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
    return spoil


def edit_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        index = json.loads((directory / convert.INDEX).read_text())
        change(index["weight_map"])
        (directory / convert.INDEX).write_text(json.dumps(index))
    return spoil


def edit_config(key: str, value: int) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        config["text_config"][key] = value
        (directory / "config.json").write_text(json.dumps(config))
    return spoil


def edit_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        file = directory / "model-00001-of-00003.safetensors"
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])
    return spoil


def cut(directory: Path) -> None:
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


WKV = "layers.2.attn.wkv.weight"
SINK = "layers.0.attn.attn_sink"   # in the first file
BAD = {
    "no folder": (lambda d: shutil.rmtree(d), "there is no folder"),
    "no config": (lambda d: (d / "config.json").unlink(), "there is no configuration at"),
    "no index": (lambda d: (d / convert.INDEX).unlink(), "neither model.safetensors.index.json nor shards"),
    "index is not JSON": (lambda d: (d / convert.INDEX).write_text("{"), "is not a readable index"),
    "index without map": (lambda d: (d / convert.INDEX).write_text("{}"), "is not a readable index"),
    "missing file": (lambda d: (d / "model-00002-of-00003.safetensors").unlink(),
                     "lists model-00002-of-00003.safetensors, which is not there"),
    "file elsewhere": (edit_index(lambda m: m.update({WKV: "../x.safetensors"})), "outside its folder: ../x.safetens"),
    "index points to another file": (edit_index(lambda m: m.update({SINK: "model-00002-of-00003.safetensors"})),
                                     f"{SINK}, but the index says model-00002-of-00003"),
    "tensor not in the index": (edit_index(lambda m: m.pop(SINK)), f"{SINK}, but the index does not list it"),
    "tensor only in the index": (rewrite(WKV, lambda t: t.pop(WKV)), f"holds {WKV}, but it does not"),
    "tensor gone": (lambda d: (rewrite(WKV, lambda t: t.pop(WKV))(d), edit_index(lambda m: m.pop(WKV))(d)),
                    f"the tensor {WKV} is missing"),
    "wrong shape": (rewrite(WKV, lambda t: t.update({WKV: t[WKV][:32].clone()})), f"{WKV} is F8_E4M3 [32, 160]"),
    "transposed": (rewrite(WKV, lambda t: t.update({WKV: t[WKV].T.contiguous()})), f"{WKV} is F8_E4M3 [160, 64]"),
    "wrong dtype": (rewrite(WKV, lambda t: t.update({WKV: t[WKV].to(torch.bfloat16)})), f"{WKV} is BF16 [64, 160]"),
    "same width": (rewrite(WKV, lambda t: t.update({WKV: t[WKV].view(torch.int8)})), f"{WKV} is I8 [64, 160]"),
    "unknown dtype": (rewrite(WKV, lambda t: t.update({WKV: t[WKV].to(torch.float64)})), f"{WKV} is F64 [64, 160]"),
    "wrong name": (lambda d: (rewrite(WKV, lambda t: t.update({"layers.2.attn.wkw.weight": t[WKV].clone()}))(d),
                              edit_index(lambda m: m.update({"layers.2.attn.wkw.weight": m[WKV]}))(d)),
                   "the tensor layers.2.attn.wkw.weight is not one of this model"),
    "another model": (edit_config("q_lora_rank", 128), "config.json asks for"),
    "cut off": (cut, "it is cut off or damaged"),
    "empty file": (lambda d: (d / "model-00001-of-00003.safetensors").write_bytes(b""), "is not a safetensors file"),
    "text": (lambda d: (d / "model-00001-of-00003.safetensors").write_text("version https://git-lfs\n" * 9),
             "is not a safetensors file"),
    "header is a list": (edit_header(lambda h: h.update({SINK: 1})), "its header makes no sense"),
    "negative shape": (edit_header(lambda h: h[SINK].update(shape=[-6])), "its header makes no sense"),
    "three offsets": (edit_header(lambda h: h[SINK].update(data_offsets=[0, 1, 2])), "its header makes no sense"),
    "bytes overlap": (edit_header(lambda h: h[SINK].update(data_offsets=[8, 32])), "do not fit its type and shape"),
    "bytes too few": (edit_header(lambda h: h[SINK].update(shape=[7])), f"the bytes of {SINK} do not fit"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused_in_one_sentence(case: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, sentence = BAD[case]
    assert convert.main(["--check", str(copy)]) == 0
    capsys.readouterr()
    spoil(copy)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        open_checkpoint(copy)
    if copy.exists():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            load_model(copy, device="cpu")
        assert convert.main(["--check", str(copy)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_a_scale_in_another_file_than_its_weight_is_legal() -> None:
    where = json.loads((CHECKPOINT / convert.INDEX).read_text())["weight_map"]
    scales = [name for name in where if name.endswith(".scale")]
    apart = {name for name in scales if where[name] != where[name.replace("scale", "weight")]}
    assert {"layers.0.ffn.experts.0.w1.scale", "layers.1.engram.embed.scale", "layers.0.attn.wkv.scale"} <= apart
    assert open_checkpoint(CHECKPOINT).ranks is None


@pytest.mark.parametrize("arguments, sentence", [
    (["--random", str(PARALLEL)], "--save-path is needed"), ([], "one of the arguments"),
    (["--check", str(CHECKPOINT), "--bogus"], "unrecognized arguments: --bogus"),
    (["--hf-ckpt-path", str(CHECKPOINT), "--save-path", "x"], "--model-parallel is needed"),
    (["--random", str(PARALLEL), "--save-path", "x", "--seed", "y"], "argument --seed: invalid int value: 'y'"),
    (["--check", str(CHECKPOINT), "--random", str(PARALLEL)], "not allowed with argument --check")])
def test_bad_arguments_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and sentence in err and err.count("\n") == 1


# ----------------------------------------------------------------------------------------------------- random weights

def test_random_is_deterministic_in_the_seed(parallel: Path, tmp_path: Path) -> None:
    write_random(PARALLEL, tmp_path / "same", 5, CHECKPOINT)
    assert convert.main(["--random", str(PARALLEL), "--save-path", str(tmp_path / "other"), "--seed", "6"]) == 0
    names = sorted(p.name for p in parallel.iterdir())
    assert names == ["config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), convert.INDEX,
                     "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (parallel / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    a, b = stored(parallel), stored(tmp_path / "other")
    varied = [name for name, tensor in a.items() if tensor.numel() > 8 and not name.endswith(".scale")]
    assert not any(torch.equal(bits(a[name]), bits(b[name])) for name in varied)
    assert not (tmp_path / "other" / "tokenizer.json").exists()
    assert sorted(p.name for p in parallel.parent.iterdir()) == ["checkpoint"]


def test_random_weights_have_the_spread_they_should(parallel: Path) -> None:
    tensors = stored(parallel)
    def std_of(name: str) -> float:
        w = tensors[f"{name}.weight"]
        dense = w if w.dtype == torch.bfloat16 else dequantise_weight(w, tensors[f"{name}.scale"], torch.float32)
        return float(dense.float().std() * dense.shape[-1] ** 0.5)
    gains = {"layers.2.attn.wq_a": 1, "layers.2.attn.wq_b": 2, "layers.2.attn.wo_a": 1.5, "layers.3.engram.wkv": 1,
             "layers.2.ffn.experts.3.w1": 1, "layers.2.ffn.experts.7.w2": 2, "layers.2.ffn.shared_experts.w3": 1,
             "layers.2.attn.compressor.wgate": 2, "layers.2.ffn.gate": 2, "layers.2.attn.indexer.wk": 1}
    for name, gain in gains.items():
        # an FP8 weight has few scales here, so its spread is less certain
        rel = 0.12 if tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn else 0.05
        assert std_of(name) == pytest.approx(gain, rel=rel), name
    assert std_of("head") == pytest.approx(2.5, rel=0.02)
    table = tensors["layers.3.engram.embed.weight"].float() * tensors["layers.3.engram.embed.scale"].float()
    assert table.shape == (2034, 32) and float(table.std()) == pytest.approx(1, rel=0.04)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.int8 or bool(torch.isfinite(tensor.float()).all()), name
        if name.endswith("attn_sink"):
            assert all(float(part.min()) < 0 < float(part.max()) for part in tensor.chunk(4))
        if name.endswith(".gate.bias"):
            assert not torch.equal(tensor, tensors[f"{name}_vl"])
        if name.endswith(".scale") and tensor.numel() > 32:
            assert 1 < len(tensor.view(torch.uint8).unique()) <= 2, name
    comb = tensors["layers.5.hc_ffn_base"][8:].view(4, 4)
    assert float((comb - comb.T).abs().max()) > 0.3


def test_random_weights_do_not_repeat_between_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = convert.RandomWeights(ModelConfig.from_json(PARALLEL), 0)
    monkeypatch.setattr(convert, "CHUNK", 8 * 320 * 20)  # 20 rows
    blocks = list(weights.chunks("head.weight", convert.TensorSpec("BF16", (50, 160))))
    assert [len(block) for block in blocks] == [20, 20, 10]
    assert not np.array_equal(blocks[0], blocks[1])


def test_a_random_model_stays_sane(parallel: Path) -> None:
    tokens = torch.randint(12, 640, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    record = twin.forward(str(parallel), tokens)
    for layer in range(8):
        assert 0.5 < float(record[f"layers.{layer}.input"].float().square().mean().sqrt()) < 10
        experts = record[f"layers.{layer}.route_experts"].flatten().bincount(minlength=8)
        assert int((experts > 0).sum()) >= 7 and int(experts.max()) < 0.9 * 40
    logits = record["logits"]
    assert 1.5 < float(logits.std()) < 4 and float(logits.softmax(-1).max(-1)[0].mean()) < 0.6
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_random_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for target, sentence in ((tmp_path / "full", "is not empty: x is not part of an earlier run for"),
                             (tmp_path / "full" / "x", "is not a folder")):
        with pytest.raises(ValueError, match=sentence):
            write_random(PARALLEL, target, 0)
    with pytest.raises(ValueError, match="seed -1 is negative"):
        write_random(PARALLEL, tmp_path / "new", -1)
    with pytest.raises(ValueError, match="no tokenizer.json in"):
        write_random(PARALLEL, tmp_path / "new", 0, tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes of free disk space, 5,000,000 are left; nothing was wr"):
        write_random(PARALLEL, tmp_path / "new" / "deeper", 0)
    assert not (tmp_path / "new").exists()


class Killed(BaseException):
    """As if the process had gone: nothing after it runs."""


@pytest.fixture
def half_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left of the run that makes `parallel`, killed while it wrote the second file."""
    target = tmp_path / "half"

    def killed(file: int) -> None:
        if list(target.glob("model-00002*.partial")):
            raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(convert.os, "fsync", killed)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process cleans nothing up
        with pytest.raises(Killed):
            write_random(PARALLEL, target, 5, CHECKPOINT)
    assert sorted(p.name for p in target.iterdir()) == [
        "config.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors.partial", "tokenizer.json",
        "tokenizer_config.json"]
    return target


def test_a_killed_random_run_is_taken_up_again(half_random: Path, parallel: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="holds neither"):
        open_checkpoint(half_random)
    first = half_random / "model-00001-of-00003.safetensors"
    written = first.stat().st_mtime_ns
    (half_random / (convert.INDEX + ".partial")).write_text("{")
    arguments = ["--random", str(PARALLEL), "--save-path", str(half_random), "--seed", "5", "--tokenizer", str(CHECKPOINT)]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_safetensors", interrupted)
        assert convert.main(arguments) == 130
    assert capsys.readouterr().err == "interrupted; the same command takes it up again\n"
    for _ in range(2):  # a finished one is complete as it is
        assert convert.main(arguments) == 0
        assert first.stat().st_mtime_ns == written, "finished, but written again"
        assert sorted(p.name for p in half_random.iterdir()) == sorted(p.name for p in parallel.iterdir())
        for path in half_random.iterdir():
            assert path.read_bytes() == (parallel / path.name).read_bytes()


def test_what_another_random_run_left_is_refused(half_random: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(json.loads(PARALLEL.read_text()) | {"bos_token_id": 7}))
    write_random(PARALLEL, tmp_path / "six", 6)

    def refused(sentence: str, config: Path = PARALLEL, seed: int = 5, tokenizer: Path | None = CHECKPOINT) -> None:
        before = {p.name: p.read_bytes() for p in half_random.iterdir()}
        with pytest.raises(ValueError, match=re.escape(sentence)):
            write_random(config, half_random, seed, tokenizer)
        assert {p.name: p.read_bytes() for p in half_random.iterdir()} == before
    first = half_random / "model-00001-of-00003.safetensors"
    name, ours = first.name, first.read_bytes()
    refused(f"{name} does not hold the random weights of {PARALLEL} with seed 6", seed=6)
    refused("config.json is not part of an earlier run", tmp_path / "other.json")
    refused("tokenizer.json is not part of an earlier run", tokenizer=None)
    shutil.copy(tmp_path / "six" / name, first)
    refused(f"{name} does not hold the random weights of")
    first.write_bytes(ours)
    save_file(load_file(first), first)  # the same tensors in another order
    refused(f"{name} does not hold the random weights of")
    first.write_bytes(ours[:-1])
    refused(f"{name} has ")
    first.write_bytes(ours)
    (half_random / "notes.partial").touch()
    refused("is not empty: notes.partial is not part of an earlier run")


# ------------------------------------------------------------------------------------------------------------- shards

def expected_part(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor | None:
    """The slicing rules, spelled out tensor by tensor."""
    if match := re.search(r"\.experts\.(\d+)\.", name):
        return tensor if int(match[1]) in range(rank * (8 if "layers" in name else 4) // size,
                                                (rank + 1) * (8 if "layers" in name else 4) // size) else None
    if re.search(r"^(layers|mtp)\.\d+\.attn\.wo_b\.", name):
        return tensor.view(torch.uint8).chunk(size, 1)[rank].view(tensor.dtype)
    if re.search(r"^(embed|head)\.weight|attn\.(wq_b|wo_a|indexer\.wq_b)\.|attn_sink|weights_proj|markov_head", name):
        return tensor.view(torch.uint8).chunk(size, 0)[rank].view(tensor.dtype)
    if "engram.embed" in name:
        rows, raw = -(-len(tensor) // size), tensor.view(torch.uint8)
        padded = raw.new_full((rows * size, raw.shape[1]), 127 if "scale" in name else 0)
        padded[: len(raw)] = raw
        return padded[rank * rows:(rank + 1) * rows].view(tensor.dtype)
    return tensor


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_hold_the_right_slices(size: int, parallel: Path, shards4: Path, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    target = shards4 if size == 4 else tmp_path / "deep" / "shards"
    if size != 4:
        monkeypatch.setattr(convert, "CHUNK", 1000)  # so that tensors are copied in many blocks
        assert convert.main([*CUT, str(parallel), "--save-path", str(target), "--model-parallel", str(size)]) == 0
    copied = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    files = [f"model{rank}-mp{size}.safetensors" for rank in range(size)]
    assert {p.name for p in target.iterdir()} == {*copied, *files}
    for name in copied:
        assert (target / name).read_bytes() == (parallel / name).read_bytes()
    source = stored(parallel)
    for rank in range(size):
        wanted = {name: part for name, t in source.items() if (part := expected_part(name, t, rank, size)) is not None}
        found = load_file(target / files[rank])
        assert found.keys() == wanted.keys()
        for name, part in wanted.items():
            assert found[name].dtype == part.dtype and found[name].shape == part.shape, name
            assert torch.equal(bits(found[name]), bits(part)), name


def test_cutting_holds_a_block_of_a_tensor_in_memory(parallel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(spec.nbytes for spec in checkpoint_schema(ModelConfig.from_json(PARALLEL)).values())
    monkeypatch.setattr(convert, "CHUNK", largest // 16)
    checkpoint = open_checkpoint(parallel)
    name, entry = max(checkpoint.tensors[0].items(), key=lambda item: item[1].spec.nbytes)
    part = convert.part_of(checkpoint.config, name, entry.spec, 0, 1)
    tracemalloc.start()
    read = sum(block.nbytes for block in entry.chunks(part))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == largest and peak < largest // 4


def test_sizes_that_do_not_divide_are_refused(parallel: Path, tmp_path: Path) -> None:
    config = json.loads(PARALLEL.read_text())
    cases = [("num_attention_heads", 6), ("o_groups", 6), ("vocab_size", 642), ("n_routed_experts", 10),
             ("index_n_heads", 6), ("dspark_n_routed_experts", 6)]
    for key, value in cases:
        changed = {**config, "text_config": {**config["text_config"], key: value}}
        if key == "num_attention_heads":
            changed["text_config"]["o_groups"] = 2
        with pytest.raises(ValueError, match=f"^{key} = {value} does not divide over 4 tensor-parallel ranks"):
            convert.check_ranks(ModelConfig.from_dict(changed), 4)
    narrow = {**config, "text_config": {**config["text_config"], "o_lora_rank": 24, "o_groups": 4}}
    with pytest.raises(ValueError, match=r"each has 24 inputs of wo_b .* not a multiple of 32"):
        convert.check_ranks(ModelConfig.from_dict(narrow), 4)
    for size in (3, 0, -2):
        arguments = [str(parallel), "--save-path", str(tmp_path / "x"), "--model-parallel", str(size)]
        assert convert.main([*CUT, *arguments]) == 1
    assert not (tmp_path / "x").exists()


def test_a_killed_run_leaves_nothing_that_looks_finished_and_is_taken_up_again(
        parallel: Path, shards4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "shards"

    def killed(file: int) -> None:
        if list(target.glob("model1*.partial")):
            raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(convert.os, "fsync", killed)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process cleans nothing up
        with pytest.raises(Killed):
            write_shards(parallel, target, 4)
    assert sorted(p.name for p in target.iterdir()) == ["model0-mp4.safetensors", "model1-mp4.safetensors.partial"]
    with pytest.raises(ValueError, match="there is no configuration"):
        open_checkpoint(target)
    first = (target / "model0-mp4.safetensors").stat()
    needed = sum(p.stat().st_size for p in shards4.glob("model*")) - first.st_size
    partial = (target / "model1-mp4.safetensors.partial").stat().st_size
    with monkeypatch.context() as patch:  # room for what is left to write, given that the unfinished file goes
        patch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - partial + 2_000_000))
        write_shards(parallel, target, 4)
    assert (target / "model0-mp4.safetensors").stat().st_mtime_ns == first.st_mtime_ns, "finished, but written again"
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in shards4.iterdir())
    for path in target.iterdir():
        assert path.read_bytes() == (shards4 / path.name).read_bytes()


def test_a_full_disk_leaves_no_file(parallel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*CUT, str(parallel), "--save-path", str(tmp_path / "shards"), "--model-parallel", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        assert convert.main(arguments) == 1
        assert "1,000,000 are left; nothing was written" in capsys.readouterr().err
        assert not (tmp_path / "shards").exists()

    def full(file: int) -> None:  # somebody else filled it meanwhile
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(convert.os, "fsync", full)
    assert convert.main(arguments) == 1
    err = capsys.readouterr().err
    assert err == f"error: [Errno 28] No space left on device: '{tmp_path}/shards/model0-mp2.safetensors'\n"
    assert list((tmp_path / "shards").iterdir()) == []


def test_a_folder_with_other_things_in_it_is_refused(parallel: Path, shards4: Path, copy: Path, tmp_path: Path) -> None:
    def refused(source: Path, target: Path, size: int, sentence: str) -> None:
        before = {p.name: p.read_bytes() for p in target.iterdir()}
        with pytest.raises(ValueError, match=re.escape(sentence)):
            write_shards(source, target, size)
        assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    refused(copy, copy, 1, "is not empty: model-00001-of-00003.safetensors is not part of an earlier run")
    refused(parallel, shards4, 2, "is not empty: model0-mp4.safetensors is not part of an earlier run")
    refused(shards4, copy, 4, "holds shards for 4 ranks already")
    write_random(PARALLEL, tmp_path / "twin", 6, CHECKPOINT)
    refused(tmp_path / "twin", shards4, 4, "is a shard of another checkpoint")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        write_shards(parallel, tmp_path / "file", 4)


def test_bad_shards_are_refused(shards4: Path, tmp_path: Path, as_rank: Callable[[int, int], Any]) -> None:
    with pytest.raises(ValueError, match="holds shards for 4 ranks but 1 are running; start 4, or cut shards for 1"):
        load_model(shards4, device="cpu")
    with pytest.raises(ValueError, match="holds shards for 4 ranks but 8 are running"):
        load_model(shards4, device="cpu", group=as_rank(7, 8))
    target = tmp_path / "shards"
    path = target / "model2-mp4.safetensors"

    def spoiled(sentence: str, spoil: Callable[[], Any]) -> None:
        shutil.copytree(shards4, target)
        spoil()
        with pytest.raises(ValueError, match=re.escape(sentence)):
            load_model(target, device="cpu", group=as_rank(0, 4))  # every rank says so, not only the one concerned
        shutil.rmtree(target)
    write_random(PARALLEL, tmp_path / "other", 6, CHECKPOINT)
    write_shards(tmp_path / "other", tmp_path / "other4", 4)
    spoiled("the shard model2-mp4.safetensors is missing", path.unlink)
    spoiled("model2-mp4.safetensors is a shard of another model than model0-mp4.safetensors",
            lambda: shutil.copy(tmp_path / "other4" / path.name, path))
    spoiled("the tensor layers.0.ffn.experts.4.w1.weight is missing",
            lambda: shutil.copy(target / "model1-mp4.safetensors", path))
    spoiled("mixes shards made for 2 and 4 ranks", lambda: shutil.copy(path, target / "model0-mp2.safetensors"))
    spoiled("model4-mp4.safetensors is a shard that a set of 4 does not have",
            lambda: shutil.copy(path, target / "model4-mp4.safetensors"))
    spoiled("config.json asks for", lambda: edit_config("hidden_size", 192)(target))
    entries, metadata = convert.read_header(path.parent.parent / "other4" / path.name)
    assert metadata == {"format": "pt", "rank": "2", "ranks": "4", "source": weights_digest(tmp_path / "other")}

    def renamed() -> None:  # without experts of its own only the metadata can tell
        save_file(load_file(path), path, metadata={**metadata, "rank": "3"})
    spoiled("was written as shard 3 of 4: it has been renamed", renamed)


def test_digest_sees_every_byte_and_survives_cutting(parallel: Path, shards4: Path, copy: Path) -> None:
    assert weights_digest(shards4) == weights_digest(parallel) != weights_digest(copy) == weights_digest(CHECKPOINT)
    file = copy / "model-00002-of-00003.safetensors"
    data = file.read_bytes()
    for place in range(1, 500_000, 71_000):
        file.write_bytes(data[:-place] + bytes([data[-place] ^ 1]) + data[len(data) - place + 1:])
        assert file.stat().st_size == len(data) and weights_digest(copy) != weights_digest(CHECKPOINT)


# ------------------------------------------------------------------------------------------------------------ loading

def parameters(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if ".engram.embed." not in name}


@pytest.mark.parametrize("draft", [False, True])
def test_every_parameter_is_the_stored_tensor(draft: bool) -> None:
    source, model = stored(CHECKPOINT), load_model(CHECKPOINT, exact=not draft, device="cpu", draft=draft)
    assert model.num.exact != draft and (model.mtp is not None) == draft
    used = set()
    for name, parameter in parameters(model).items():
        assert not parameter.requires_grad and parameter.device.type == "cpu"
        slices = list(parameter) if ".ffn.experts." in name else [parameter]
        for e, value in enumerate(slices):
            stored_name = name.replace(".experts.", f".experts.{e}.") if ".ffn.experts." in name else name
            assert same_bits(value, source[stored_name]), stored_name
            used.add(stored_name)
    left = {name for name in source if name not in used}
    assert left == {name for name in source if ".engram.embed." in name or (name.startswith("mtp.") and not draft)}
    assert not [name for name, buffer in model.named_buffers() if buffer.is_meta]
    weight = source["layers.3.attn.wkv.weight"], source["layers.3.attn.wkv.scale"]
    dense = model.layers[3].attn.wkv.dense
    assert torch.equal(dense, dequantise_weight(*weight, dense.dtype)), "not prepared"


@pytest.mark.parametrize("size", [2, 4])
def test_shards_and_published_layout_load_the_same(size: int, parallel: Path, shards4: Path, tmp_path: Path,
                                                    as_rank: Callable[[int, int], Any]) -> None:
    shards = shards4
    if size != 4:
        write_shards(parallel, shards := tmp_path / "shards", size)
    source = stored(parallel)
    for rank in range(size):
        a = load_model(parallel, device="cpu", group=as_rank(rank, size), draft=True)
        b = load_model(shards, device="cpu", group=as_rank(rank, size), draft=True)
        for (name, x), y in zip(parameters(a).items(), parameters(b).values(), strict=True):
            assert same_bits(x, y), name
            if ".experts." not in name:
                assert same_bits(x, expected_part(name, source[name], rank, size)), name
            else:
                first = rank * len(x)
                assert same_bits(x[-1], source[name.replace(".experts.", f".experts.{first + len(x) - 1}.")]), name
        for layer, rows in ((1, 1788), (3, 2034)):
            ids = torch.arange(rows)
            x, y = a.layers[layer].engram.embed.gather(ids), b.layers[layer].engram.embed.gather(ids)
            table = f"layers.{layer}.engram.embed"
            dense = (source[f"{table}.weight"].float() * source[f"{table}.scale"].float()).to(torch.bfloat16)
            dense[ids // -(-rows // size) != rank] = 0
            assert same_bits(x, dense) and same_bits(y, dense)


def test_loading_is_strict_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(change: Callable[[Transformer], None]) -> type:
        class Changed(Transformer):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                change(self)
        return Changed
    extra = torch.nn.Parameter(torch.empty(3), requires_grad=False)
    cases = [(lambda m: m.layers[2].register_parameter("more", extra), "asks for a tensor layers.2.more"),
             (lambda m: delattr(m.layers[2].attn, "attn_sink"), "has no place for the tensor layers.2.attn.attn_sink"),
             (lambda m: setattr(m.norm, "weight", extra), r"norm.weight is BF16 \[160\]; the model holds .*32 \[3\]"),
             (lambda m: m.register_buffer("empty", torch.empty(2, device="meta")), "buffer .*empty .* has no value")]
    for change, sentence in cases:
        monkeypatch.setattr(convert, "Transformer", changed(change))
        with pytest.raises(ValueError, match=sentence):
            load_model(CHECKPOINT, device="cpu")


def test_sizes_that_do_not_divide_are_refused_when_loading(as_rank: Callable[[int, int], Any]) -> None:
    with pytest.raises(ValueError, match="o_groups = 3 does not divide over 2 tensor-parallel ranks"):
        load_model(CHECKPOINT, device="cpu", group=as_rank(0, 2))


def test_a_draft_head_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = json.loads(PARALLEL.read_text())
    ratios = config["text_config"]["compress_ratios"][:8]
    config["text_config"].update(num_nextn_predict_layers=0, compress_ratios=ratios, dspark_target_layer_ids=[])
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_random(tmp_path / "config.json", tmp_path / "checkpoint", 0, CHECKPOINT)
    with pytest.raises(ValueError, match="has no draft head: num_nextn_predict_layers = 0"):
        load_model(tmp_path / "checkpoint", device="cpu", draft=True)


def test_another_tokenizer_is_refused(copy: Path) -> None:
    edit_config("engram_compressed_vocab_size", 571)(copy)
    with pytest.raises(ValueError, match="572 Engram classes but engram_compressed_vocab_size is 571"):
        load_model(copy, device="cpu")


def test_offloaded_experts_stay_on_disk(as_rank: Callable[[int, int], Any], parallel: Path, shards4: Path) -> None:
    for directory in (parallel, shards4):
        model = load_model(directory, exact=True, device="cpu", group=as_rank(2, 4), offload=True)
        whole = load_model(directory, exact=True, device="cpu", group=as_rank(2, 4))
        for layer in (0, 7):
            for w in ("w1", "w2", "w3"):
                a, b = getattr(model.layers[layer].ffn.experts, w), getattr(whole.layers[layer].ffn.experts, w)
                assert a.weight.is_meta and a.scale.is_meta and b.store is None
                chosen = torch.tensor([1, 0, 1])
                weight, scale = a.store(chosen)
                assert same_bits(weight, b.weight[chosen])
                assert same_bits(scale.view(torch.uint8), b.scale.view(torch.uint8)[chosen])
        assert same_bits(model.layers[0].attn.wkv.weight, whole.layers[0].attn.wkv.weight)


def test_offloaded_experts_compute_the_same() -> None:
    tokens = torch.randint(0, 640, (1, 20), generator=torch.Generator().manual_seed(3))
    logits = []
    for offload in (False, True):
        model = load_model(CHECKPOINT, exact=True, device="cpu", offload=offload)
        logits.append(model(tokens, model.new_cache(1, 64)).logits)
    assert same_bits(*logits)


def test_the_cache_of_experts_is_bounded(parallel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = open_checkpoint(parallel).tensors[0]
    pairs = [tuple(entries[f"layers.0.ffn.experts.{e}.w1.{leaf}"] for leaf in ("weight", "scale")) for e in range(8)]
    size = sum(entry.spec.nbytes for entry in pairs[0])
    cache = convert.ExpertCache(3 * size)
    store, reads = convert.ExpertStore(pairs, cache, torch.device("cpu")), []
    read = convert.Entry.read
    monkeypatch.setattr(convert.Entry, "read", lambda entry: (reads.append(entry), read(entry))[1])
    for expert, total in ((0, 2), (1, 4), (2, 6), (0, 6), (3, 8), (0, 8), (2, 8), (1, 10)):  # least recently used goes
        assert torch.equal(store(torch.tensor([expert]))[0][0], read(pairs[expert][0]))
        assert len(reads) == total and cache.nbytes == sum(t.nbytes for t in cache.kept.values()) <= 3 * size
    assert store(torch.arange(8))[0].shape == (8, 96, 80) and cache.nbytes <= 3 * size
