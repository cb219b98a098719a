"""--offload: weights stay on disk, the bits stay the same, and the memory of the process stays small."""
from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import convert
from convert import load_model, write_random, write_shards
from golden_data import CHECKPOINT, same_bits
from model import Transformer
from parallel_runs import all_runs, as_rank, unequal
from real_tokenizer import real_tokenizer_path

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    write_random(HERE / "configs" / "parallel.json", folder / "checkpoint", 3, CHECKPOINT)
    return folder / "checkpoint"


@pytest.fixture
def map_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map what is otherwise too small to be worth it."""
    monkeypatch.setattr(convert, "MAPPED", 1)


def test_offloaded_weights_compute_the_same(parallel: Path, map_all: None) -> None:
    """Backbone, vision, Engram, drafts."""
    offloaded = load_model(parallel, True, "cpu", draft=True, offload=True)
    assert offloaded.layers[2].attn.wo_b.dense is None and offloaded.layers[2].ffn.experts.w1.weight.is_meta
    runs = ("text", "image", "bounded")
    loaded = load_model(parallel, True, "cpu", draft=True)
    assert unequal(all_runs(offloaded, runs=runs), all_runs(loaded, runs=runs)) == []


@pytest.mark.long
def test_offload_in_fast_mode_repeats_itself(parallel: Path, map_all: None) -> None:
    """Not the bits of weights in memory: a library may sum in another order where a matrix begins at another address, and
    then a selection flips. Other weights would agree at one position in 640."""
    first, again, loaded = (all_runs(load_model(parallel, False, "cpu", offload=way), runs=("text",))
                            for way in (True, True, False))
    assert unequal(first, again) == []
    best, same = (run["text.logits"].argmax(-1) for run in (first, loaded))
    assert (best == same).float().mean() > 0.6


def test_each_rank_maps_its_own_slices(parallel: Path, map_all: None, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(parallel, tmp_path / "shards", 4)
    group = as_rank(monkeypatch, 3, 4)
    whole = dict(load_model(parallel, device="cpu", group=group, draft=True).named_parameters())
    for directory in (parallel, tmp_path / "shards"):
        for name, parameter in load_model(directory, device="cpu", group=group, draft=True, offload=True).named_parameters():
            assert parameter.is_meta == (".experts." in name or ".engram.embed." in name), name
            assert parameter.is_meta or same_bits(parameter, whole[name]), name


def test_layers_let_go_of_their_weights(parallel: Path, map_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some forwards every map has been released but those of the three image rows, which are never so large."""
    released: set[int] = set()
    monkeypatch.setattr(convert, "release", lambda maps: released.update(map(id, maps)))
    owned: dict[str, list[int]] = {}
    original = convert.Entry.map

    def map_and_note(entry: convert.Entry, part: Any = None) -> Any:
        found = original(entry, part)
        if found is not None:
            owned.setdefault(str(entry.path), []).append(id(found[1]))
        return found
    monkeypatch.setattr(convert.Entry, "map", map_and_note)
    model = load_model(parallel, True, "cpu", draft=True, offload=True)
    all_runs(model, runs=("text", "image"))
    maps = {number for numbers in owned.values() for number in numbers}
    assert len(maps) > 300 and released < maps and len(maps - released) == 3


def test_an_offloaded_model_can_be_moved_and_copied(parallel: Path, map_all: None) -> None:
    model = load_model(parallel, True, "cpu", offload=True)
    tokens = torch.arange(20, 40)[None]
    expected = model(tokens, model.new_cache()).logits
    for other in (model.to("cpu"), copy.deepcopy(model)):
        assert other.layers[0].ffn.experts.w1.weight.is_meta
        assert same_bits(other(tokens, other.new_cache()).logits, expected)
    with pytest.raises(ValueError, match="cannot change dtype|not change dtype"):
        model.to(torch.bfloat16)


# ------------------------------------------------------------------------------------------ released size, little memory

MEASURE = """
import json, sys, time
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(2)
def peak(): return next(int(line.split()[1]) / 2**20 for line in open("/proc/self/status") if line.startswith("VmHWM"))
began = time.time()
{program}
print(json.dumps([time.time() - began, peak()]))
"""


def measured(program: str) -> tuple[float, float]:
    """Seconds and the peak resident memory in GiB of a program in a new process."""
    paths = [str(HERE.parent), str(HERE)]
    done = subprocess.run([sys.executable, "-c", MEASURE.format(paths=paths, program=program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, gib = json.loads(done.stdout.splitlines()[-1])
    return seconds, gib


def released_width(folder: Path, **changes: Any) -> Path:
    """A random checkpoint of layers of full width, 384 experts each, with the real vocabulary and tokenizer."""
    config = json.loads((HERE.parent / "config.json").read_text())
    config["text_config"] |= dict(num_nextn_predict_layers=0, dspark_target_layer_ids=[], engram_layer_ids=[],
                                  engram_num_embeddings=[], candidate_source_layer_id=-1) | changes
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    real_tokenizer_path(folder)
    write_random(folder / "config.json", folder / "checkpoint", 1, folder)
    return folder / "checkpoint"


@pytest.mark.manual
def test_a_full_layer_runs_in_4_gib(tmp_path: Path) -> None:
    """One layer of 384 experts with embedding and head of 129,280 rows: 10 GB on disk."""
    path = released_width(tmp_path, num_hidden_layers=1, compress_ratios=[0], kv_source_layer_ids=[],
                          index_source_layer_ids=[])
    for exact, tokens in ((True, 16), (False, 48)):
        seconds, gib = measured(f"""
from convert import load_model
model = load_model({str(path)!r}, exact={exact}, device="cpu", offload=True)
ids = torch.randint(100, 120000, (1, {tokens}), generator=torch.Generator().manual_seed(0))
logits = model(ids, model.new_cache(1, 64), logits="last").logits
assert logits.isfinite().all()""")
        print(f"\n{'exact' if exact else 'fast'}, prompt of {tokens}: {seconds:.0f} s, peak {gib:.2f} GiB")
        assert gib < 4


@pytest.mark.manual
def test_golden_recordings_of_a_model_larger_than_memory(tmp_path: Path) -> None:
    """Three layers of full size (window only; Full, m = 2; Full, m = 1 with the pool), 24 GB, recorded by golden.py."""
    path = released_width(tmp_path, num_hidden_layers=3, compress_ratios=[0, 2, 1], kv_source_layer_ids=[1, 2],
                          index_source_layer_ids=[1, 2], candidate_source_layer_id=2)
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(1000, 1012))))
    seconds, gib = measured(f"""
import golden
assert golden.main(["record", "--ckpt-path", {str(path)!r}, "--tokens", {str(tmp_path / 'tokens.json')!r}, "--decode", "1",
                    "--out", {str(tmp_path / 'out.safetensors')!r}, "--device", "cpu", "--offload"]) == 0""")
    print(f"\n12 tokens and 1 more, recorded: {seconds:.0f} s, peak {gib:.2f} GiB")
    assert gib < 4
