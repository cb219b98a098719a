"""Tensor parallelism keeps the bits (I3): groups of processes over gloo, and generate.py in them.

The runs compared are those of parallel_runs: chunks and decoding with drafts, a ragged batch, images, sampling; every
residual stream, selection, route, logit, draft and what the caches hold, sign of zero included.
"""
from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import generate
from convert import write_random, write_shards
from golden_data import CHECKPOINT, same_bits
from parallel_runs import load_and_run, on_ranks, released_layers, unequal
from quant import Linear, Numerics, Ranks, to_bf16

HERE = Path(__file__).parent
TINY = HERE.parent / "tiny"


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with vision, Engram and drafts whose sizes divide by 4."""
    folder = tmp_path_factory.mktemp("parallel")
    write_random(HERE / "configs" / "parallel.json", folder / "checkpoint", 3, CHECKPOINT)
    return folder / "checkpoint"


def check(results: dict[int, list[dict[str, Tensor]]], expected: dict[str, Tensor]) -> None:
    for size, ranks in results.items():
        for rank, arrays in enumerate(ranks):
            assert unequal(arrays, expected) == [], f"rank {rank} of {size}"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_i3_ranks_give_the_bits_of_one(size: int, parallel: Path, tmp_path: Path) -> None:
    """Four read the published layout, two their shards."""
    if size == 2:
        write_shards(parallel, tmp_path / "shards", 2)
    runs = ("text", "ragged", "image", "sampled")
    expected = load_and_run(None, str(parallel), "cpu", True, runs)
    assert expected["text.logits"].signbit().any() and len(expected) > 1000
    where = {2: str(tmp_path / "shards"), 4: str(parallel)}
    check(on_ranks((size,), tmp_path / "ranks", load_and_run, where, "cpu", True, runs), expected)


@pytest.mark.long
def test_i3_the_small_checkpoint_that_ships(tmp_path: Path) -> None:
    check(on_ranks((2, 4), tmp_path, load_and_run, str(TINY)), load_and_run(None, str(TINY)))


@pytest.mark.long
def test_i3_layers_of_released_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(released_layers()))
    write_random(tmp_path / "config.json", tmp_path / "checkpoint", 1, CHECKPOINT)
    runs = ("text",)
    expected = load_and_run(None, str(tmp_path / "checkpoint"), "cpu", True, runs)
    check(on_ranks((2, 4), tmp_path / "ranks", load_and_run, str(tmp_path / "checkpoint"), "cpu", True, runs), expected)


# ------------------------------------------------------------------------------------- what the equality above is worth

class OtherRank(Ranks):
    """Stands for the all-reduce of two ranks inside one process: adds what `other` computes for the same input."""

    def sum(self, x: Tensor) -> Tensor:
        return x + self.group(x)


def test_partial_sums_must_travel_unrounded() -> None:
    """A sum of partial sums that were rounded is another sum: what the released code does (difference D4)."""
    g = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 128, generator=g).bfloat16(), torch.randn(50, 128, generator=g).bfloat16()
    halves = [weight[:, :64].double(), weight[:, 64:].double()]

    def half(reduce: Ranks | None) -> Linear:
        layer = Linear(64, 64, "bf16", Numerics(torch.float64), reduce=reduce)
        layer.weight = torch.nn.Parameter(weight[:, :64].contiguous(), requires_grad=False)
        return layer

    whole = to_bf16(x.double() @ weight.double().T)
    unrounded = half(OtherRank(0, 2, lambda _: x[:, 64:].double() @ halves[1].T))(x[:, :64])
    rounded = to_bf16(half(None)(x[:, :64]).double() + to_bf16(x[:, 64:].double() @ halves[1].T).double())
    assert same_bits(unrounded, whole)
    assert (rounded != whole).float().mean() > 0.2


# ------------------------------------------------------------------------------------------------- generate.py in ranks

class Team:
    """`torchrun --nproc-per-node SIZE generate.py ...` with pipes. `before` is Python that every rank runs first."""

    def __init__(self, size: int, folder: Path, arguments: list[str], before: str = "", device: str = "cpu") -> None:
        self.marker = str(folder / "rank.py")      # in the command line of every process of this run
        Path(self.marker).write_text(f"import os, sys\nsys.path[:0] = [{str(HERE.parent)!r}]\nimport generate, torch\n"
                                     f"RANK = int(os.environ['RANK'])\n{before}\nsys.exit(generate.main())\n")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), self.marker,
             "--device", device, *arguments], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"})

    def alive(self) -> int:
        """How many processes of this run there are."""
        lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        return sum(self.marker.encode() in line for line in lines)

    def finish(self, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, stdout and stderr once torchrun has ended, and with it all ranks."""
        try:
            out, err = self.process.communicate(stdin, timeout=150)
            assert self.alive() == 0
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def alone(options: list[str], stdin: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and stdout of generate.py in this process."""
    with monkeypatch.context() as patch:
        streams = {name: io.TextIOWrapper(io.BytesIO(stdin.encode())) for name in ("stdin", "stdout", "stderr")}
        streams["stdout"].buffer.truncate(0)
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        code = generate.main([*options, "--device", "cpu"])
        streams["stdout"].flush()
    return code, streams["stdout"].buffer.getvalue().decode()


CHAT = "hello there\n/think on\nand?\n/bad\n"


@pytest.mark.long
def test_a_chat_in_two_ranks_says_what_one_says_and_ends_with_its_input(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--ckpt-path", str(TINY), "--exact", "--speculative", "--max-new-tokens", "9", "--seed", "5"]
    code, out, err = Team(2, tmp_path, options).finish(CHAT)
    assert (code, out) == alone(options, CHAT, monkeypatch) and code == 0 and len(out) > 40
    assert err.count("error: /bad is not a command") == 1      # one rank speaks


FAILS_IN_A_FORWARD = """
import time
forward, calls = generate.Transformer.forward, []
def failing(self, *args, **kwargs):
    calls.append(1)
    if RANK == 1 and len(calls) == 4:
        print(f"{time.time()} raised", file=sys.stderr)
        raise RuntimeError("this rank is out of memory\\nand this is not for people")
    return forward(self, *args, **kwargs)
generate.Transformer.forward = failing
"""


@pytest.mark.long
def test_an_error_in_one_rank_ends_all(tmp_path: Path) -> None:
    code, out, err = Team(2, tmp_path, ["--max-new-tokens", "99"], FAILS_IN_A_FORWARD).finish("hello\nagain\n")
    assert code == 1 and "error: rank 1: this rank is out of memory\n" in err and "not for people" not in err
    assert time.time() - float(re.search(r"(\S+) raised", err)[1]) < 15


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_load_ends_all(tmp_path: Path, rank: int) -> None:
    before = f"""
load = generate.load_model
def load_or_fail(*args, **kwargs):
    if RANK == {rank}:
        raise OSError(5, "Input/output error", "model0.safetensors")
    return load(*args, **kwargs)
generate.load_model = load_or_fail
"""
    code, out, err = Team(2, tmp_path, ["--prompt", "hi"], before).finish()
    sentence = "[Errno 5] Input/output error: 'model0.safetensors'"
    assert (code, out) == (1, "") and err.count(sentence) == 1
    assert f"error: {sentence}" in err if rank == 0 else f"error: rank 1: {sentence}" in err


@pytest.mark.long
@pytest.mark.parametrize("case", ["shards for 4", "does not divide", "arguments", "tokenizer"])
def test_case_26_one_sentence_and_exit_code_1(case: str, parallel: Path, tmp_path: Path) -> None:
    options = {"shards for 4": ["--ckpt-path", str(tmp_path / "shards")], "does not divide": ["--ckpt-path", str(CHECKPOINT)],
               "arguments": ["--temperature", "-1"], "tokenizer": ["--ckpt-path", str(tmp_path / "bare")]}[case]
    sentence = {"shards for 4": "holds shards for 4 ranks but 2 are running; start 4, or cut shards for 2",
                "does not divide": "o_groups = 3 does not divide over 2 tensor-parallel ranks",
                "arguments": "temperature = -1.0 must be a number >= 0", "tokenizer": "tokenizer.json"}[case]
    if case == "shards for 4":
        write_shards(parallel, tmp_path / "shards", 4)
    if case == "tokenizer":
        shutil.copytree(TINY, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    code, out, err = Team(2, tmp_path, [*options, "--prompt", "hi"]).finish()
    assert (code, out) == (1, "") and len(re.findall(f"^error: .*{re.escape(sentence)}", err, re.MULTILINE)) == 1
    assert len(re.findall("^Traceback", err, re.MULTILINE)) == 1       # torchrun's own, about the exit code


@pytest.mark.long
@pytest.mark.parametrize("moment", ["answering", "waiting", "loading"])
def test_ctrl_c_ends_all_ranks(moment: str, tmp_path: Path) -> None:
    slow = "import time; generate.load_model = lambda *_, **__: print('loading', flush=True) or time.sleep(60)"
    team = Team(4 if moment == "answering" else 2, tmp_path, ["--max-new-tokens", "9999" if moment == "answering" else "2"],
                slow if moment == "loading" else "")
    if moment != "loading":
        team.process.stdin.write("hello\n")
        team.process.stdin.flush()
    if moment == "waiting":
        assert team.process.stdout.readline()
        time.sleep(0.5)
    else:
        assert team.process.stdout.read(1)
    began = time.monotonic()
    team.process.send_signal(signal.SIGINT)        # as torchrun gets it from a terminal; it passes it on
    code, _, err = team.finish()
    assert code != 0 and time.monotonic() - began < 15      # after 30 seconds it would kill the ranks


@pytest.mark.long
def test_files_and_single_prompts_in_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [[{"role": "user", "content": text}] for text in ("hello", "and a longer one", "x")] + ["bad"]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for what in (["--input-file", str(tmp_path / "in.jsonl"), "--batch-size", "2"], ["--prompt", "-", "--thinking"]):
        options = ["--ckpt-path", str(TINY), "--exact", "--max-new-tokens", "6", *what]
        code, out, err = Team(4, tmp_path, options).finish("what?")
        assert (code, out) == alone(options, "what?", monkeypatch) and out
