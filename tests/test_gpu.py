"""CUDA gives the bits of the CPU (I4), two GPUs those of one (I3), in exact mode; fast mode runs and repeats itself.

    pytest -m gpu -s tests/test_gpu.py         a few minutes; prints what was compared

Compared are the recordings of the released code, and the runs of parallel_runs: every residual stream, selection, route,
sublayer, logit, draft and the caches, as bits. Only what is never rounded (pre_mix, routing weights) may differ between
devices, by 1e-12.
"""
from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import test_goldens
from convert import load_model, write_random, write_shards
from golden_data import CHECKPOINT, difference, differences, golden
from model import Selection
from parallel_runs import RUNS, UNROUNDED, all_runs, load_and_run, negative_zeros, on_ranks, released_layers, unequal
from small_models import images_of
from test_parallel import CHAT, FAILS_IN_A_FORWARD, HERE, TINY, Team, alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """parallel: small random layers with everything. released: single layers of released size, few experts."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "released.json").write_text(json.dumps(released_layers()))
    for name, config in (("parallel", HERE / "configs" / "parallel.json"), ("released", folder / "released.json")):
        write_random(config, folder / name, 3, CHECKPOINT)
    return {"golden": CHECKPOINT, "tiny": TINY, "parallel": folder / "parallel", "released": folder / "released"}


@pytest.fixture(scope="module")
def on_cpu(checkpoints: dict[str, Path]) -> Any:
    """The runs of a checkpoint on the CPU, made once."""
    made: dict[str, dict[str, Tensor]] = {}

    def get(name: str) -> dict[str, Tensor]:
        if name not in made:
            before = torch.get_num_threads()
            torch.set_num_threads(min(8, torch.multiprocessing.cpu_count()) if name == "released" else 1)
            made[name] = load_and_run(None, str(checkpoints[name]), "cpu", True, runs_of(name))
            torch.set_num_threads(before)
        return made[name]
    return get


def runs_of(name: str) -> tuple[str, ...]:
    return ("text", "ties") if name == "released" else RUNS


def equal(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor], across_devices: bool = False) -> None:
    wrong = unequal(actual, expected, across_devices)
    loose = [name for name in expected if across_devices and any(f".{kind}." in name for kind in UNROUNDED)]
    elements = sum(t.numel() for t in expected.values())
    print(f"\n{what}: {len(expected)} arrays, {elements:,} elements; {len(wrong)} arrays differ "
          f"({len(loose)} compared to 1e-12)")
    assert wrong == [], wrong[:5]


# ------------------------------------------------------------------------------------------------------- one GPU: I4

class Recorder(test_goldens.Recorder):
    """The recorder of test_goldens for a model on a GPU."""

    def put(self, arrays: dict[str, Tensor]) -> None:
        super().put({name: value.cpu() for name, value in arrays.items()})

    def selection(self, layer: int, out: Any) -> dict[str, Tensor]:
        return super().selection(layer, Selection(*(None if t is None else t.cpu() for t in out)))


@pytest.mark.parametrize("way", ["one shot", "token by token"])
@pytest.mark.parametrize("run", ["text", "short", "image"])
def test_cuda_reproduces_the_recordings_of_the_released_code(run: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_goldens, "Recorder", Recorder)
    model, expected = load_model(CHECKPOINT, exact=True, device="cuda"), test_goldens.backbone(run)
    total, images = len(expected["tokens"]), None
    if run == "image":
        given = golden("image")
        features = model.encode_image(given["patches"], (8, 11))
        assert difference(features.cpu(), given["features"]) is None
        types = F.pad(given["token_types"], (0, total - len(given["token_types"])), value=-1)
        images = images_of(types.tolist(), features)
    chunks = [total] if way == "one shot" else [3] + [1] * (total - 3)
    actual, _ = test_goldens.record(model, expected["tokens"], chunks, images)
    wrong = differences({name: value.cpu() for name, value in actual.items()}, expected)
    print(f"\nrecording {run}, {way}: {len(expected)} arrays, {sum(t.numel() for t in expected.values()):,} elements; "
          f"{len(wrong)} arrays differ")
    assert wrong == []


@pytest.mark.parametrize("name", ["golden", "tiny", "parallel", "released"])
def test_i4_cuda_gives_the_bits_of_the_cpu(name: str, checkpoints: dict[str, Path], on_cpu: Any) -> None:
    """Chunks, decoding and drafts, a ragged batch, prompts full of ties, images, bounded prefill, sampling from a seed."""
    expected = on_cpu(name)
    equal(f"CPU and CUDA, {name}", load_and_run(None, str(checkpoints[name]), "cuda", True, runs_of(name)), expected, True)


def test_a_model_that_was_moved_or_offloaded_computes_the_same(checkpoints: dict[str, Path], on_cpu: Any) -> None:
    expected = {name: value for name, value in on_cpu("parallel").items() if name.startswith(("text.", "image."))}
    moved = load_model(checkpoints["parallel"], True, "cpu", draft=True).to("cuda")
    offloaded = load_model(checkpoints["parallel"], True, "cuda", draft=True, offload=True)
    both = load_model(checkpoints["parallel"], True, "cpu", draft=True, offload=True).to("cuda")
    for what, model in (("moved to CUDA", moved), ("experts on disk", offloaded), ("offloaded, then moved", both)):
        negative_zeros(model)
        equal(what, all_runs(model, runs=("text", "image")), expected, True)


@pytest.mark.parametrize("name", ["parallel", "released"])
def test_fast_mode_repeats_itself(name: str, checkpoints: dict[str, Path], on_cpu: Any) -> None:
    first, again = (load_and_run(None, str(checkpoints[name]), "cuda", False, runs_of(name)) for _ in range(2))
    equal(f"fast, twice, {name}", again, first)
    exact = on_cpu(name)["text.logits"]
    same = (first["text.logits"].argmax(-1) == exact.argmax(-1)).float().mean().item()
    gap = (first["text.logits"] - exact).abs().max().item()
    print(f"\nfast and exact, {name}: the same best token at {same:.0%} of positions, logits differ by at most {gap:.3g}")
    assert first["text.logits"].isfinite().all() and same > 0.25


# ------------------------------------------------------------------------------------------------------ two GPUs: I3

@two_gpus
def test_i3_two_gpus_give_the_bits_of_one(checkpoints: dict[str, Path], on_cpu: Any, tmp_path: Path) -> None:
    write_shards(checkpoints["parallel"], tmp_path / "shards", 2)
    for name, path in (("tiny", TINY), ("parallel", tmp_path / "shards"), ("released", checkpoints["released"])):
        one = load_and_run(None, str(checkpoints[name]), "cuda", True, runs_of(name))
        ranks = on_ranks((2,), tmp_path / name, load_and_run, str(path), "cuda", True, runs_of(name), backend="nccl")[2]
        for rank, arrays in enumerate(ranks):
            equal(f"one GPU and rank {rank} of two over NCCL, {name}", arrays, one)
        equal(f"CPU and two GPUs, {name}", ranks[0], on_cpu(name), True)


@two_gpus
def test_fast_mode_on_two_gpus_repeats_itself(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    job = (load_and_run, str(checkpoints["parallel"]), "cuda", False, RUNS)
    first, again = (on_ranks((2,), tmp_path / str(i), *job, backend="nccl")[2] for i in range(2))
    equal("fast on two GPUs, twice", again[0], first[0])
    equal("fast on two GPUs, the two ranks", first[1], first[0])


@two_gpus
def test_a_chat_on_two_gpus_says_what_the_cpu_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--ckpt-path", str(TINY), "--exact", "--speculative", "--max-new-tokens", "9", "--seed", "5"]
    began = time.monotonic()
    code, out, err = Team(2, tmp_path, options, device="cuda").finish(CHAT)
    print(f"\nchat on two GPUs: {time.monotonic() - began:.1f} s from start to end")
    assert (code, out) == alone(options, CHAT, monkeypatch) and code == 0


@two_gpus
def test_an_error_or_ctrl_c_ends_both_gpus(tmp_path: Path) -> None:
    team = Team(2, tmp_path, ["--max-new-tokens", "99"], FAILS_IN_A_FORWARD, device="cuda")
    code, out, err = team.finish("hello\nagain\n")
    seconds = time.time() - float(re.search(r"(\S+) raised", err)[1])
    print(f"\nan error in one rank: all ended after {seconds:.1f} s")
    assert code == 1 and "error: rank 1: this rank is out of memory\n" in err and seconds < 25
    team = Team(2, tmp_path, ["--max-new-tokens", "9999"], device="cuda")
    team.process.stdin.write("hello\n")
    team.process.stdin.flush()
    assert team.process.stdout.read(1)
    began = time.monotonic()
    team.process.send_signal(signal.SIGINT)
    code, _, err = team.finish()
    print(f"Ctrl-C while answering: all ended after {time.monotonic() - began:.1f} s")
    assert code != 0 and time.monotonic() - began < 25


@two_gpus
def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count() + 1
    code, out, err = Team(count, tmp_path, ["--prompt", "hi"], device="cuda").finish()
    assert (code, out) == (1, "") and err.count(f"error: {count} ranks need a CUDA device each, this machine has {count - 1}") == 1


def test_a_decode_step_never_waits_for_the_device(checkpoints: dict[str, Path]) -> None:
    """Neither in the model's forward of one token nor in that of drafts: only reading the logits waits."""
    for name, exact in (("tiny", True), ("tiny", False), ("parallel", False)):
        model = load_model(checkpoints[name], exact=exact, device="cuda", draft=True)
        cache = model.new_cache(2, 400)
        ids = torch.randint(11, model.config.vocab_size, (2, 330), generator=torch.Generator().manual_seed(0))
        model(ids[:, :300], cache, logits="last")
        for at in range(300, 310):                    # odd and even lengths, and a table's first use
            torch.cuda.set_sync_debug_mode("error" if at > 302 else "default")
            try:
                model(ids[:, at : at + 1], cache, logits="last")
            finally:
                torch.cuda.set_sync_debug_mode("default")
