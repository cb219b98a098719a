"""Golden arrays recorded from the released code on the checkpoint in tests/data/tiny, and how to compare with them.

Three runs: "text" (150 prompt tokens, 25 greedily decoded), "short" (5 and 20), "image" (21 tokens, a span of 17, 40
tokens, 6 decoded). Every array covers all positions of its run; of the residual streams and sublayers only a few layers
are kept (the twin gives the others). `golden("engram")` holds the token map, primes, multipliers and offsets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Mapping

import torch
from safetensors import safe_open

DATA = Path(__file__).parent / "data" / "tiny"
CHECKPOINT = DATA / "checkpoint"
IMAGE = DATA / "image.png"
RUNS = ("text", "short", "image")
UNROUNDED = ("pre_mix", "route_weights")  # equal to 1e-14 relative; everything else bit for bit


def golden(run: str) -> dict[str, torch.Tensor]:
    """The arrays of one run, without the run's prefix; `token_types` of the image run is [prompt], as recorded."""
    with safe_open(DATA / "golden.safetensors", framework="pt") as file:
        out = {name[len(run) + 1 :]: file.get_tensor(name) for name in file.keys() if name.startswith(f"{run}.")}
    if not out:
        raise ValueError(f"no golden run is called {run!r}")
    if "token_types" in out:
        out["token_types"] = out["token_types"][0]
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits: -0.0 differs from 0.0, a NaN equals itself."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b))


def as_bits(a: torch.Tensor) -> torch.Tensor:
    return a.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()])


def difference(actual: torch.Tensor, expected: torch.Tensor, relative: float = 0.0) -> str | None:
    """None if equal, else a sentence with the first differing row of the first dimension.

    Integers may differ in width. relative > 0 compares values in float64 instead of bits.
    """
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if relative > 0:
        actual, expected = actual.double(), expected.double()
        unequal = ~((actual - expected).abs() <= relative * expected.abs())
    else:
        if not actual.is_floating_point() and not expected.is_floating_point():
            actual, expected = actual.long(), expected.long()
        if actual.dtype != expected.dtype:
            return f"dtype {actual.dtype}, expected {expected.dtype}"
        unequal = as_bits(actual) != as_bits(expected)
    if not unequal.any():
        return None
    row = int(unequal.flatten(1).any(1).nonzero()[0]) if unequal.dim() > 1 else int(unequal.nonzero()[0])
    gap = (actual.double() - expected.double()).abs().max().item()
    return f"{int(unequal.sum())} of {unequal.numel()} elements differ, first in row {row}, at most by {gap:.3g}"


def differences(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """One line per array of `expected` that `actual` lacks or has differently; no line means equal.

    Names as in `golden`; `image.` may prefix the image arrays of `actual`. A `topk` may be padded wider with -1, a
    `candidates` mask and `token_types` may go on after the recorded prompt.
    """
    out = []
    for name, want in expected.items():
        if name == "prompt_length":
            continue
        have = actual.get(name, actual.get(f"image.{name}"))
        if have is None:
            out.append(f"{name}: missing")
            continue
        kind = name.split(".")[-1]
        if kind == "topk" and have.shape[-1] > want.shape[-1] and (have[..., want.shape[-1] :] == -1).all():
            have = have[..., : want.shape[-1]]
        if kind in ("candidates", "token_types"):
            have = have[tuple(slice(0, size) for size in want.shape)]
        sentence = difference(have, want, relative=1e-14 if kind in UNROUNDED else 0.0)
        if sentence is not None:
            out.append(f"{name}: {sentence}")
    return out
