"""The slow twin against the recordings of the released code, and its number formats against their definitions.

The twin is the oracle of the other tests, so it is checked here against things that are not the product: golden arrays,
torch's own casts, hand-computed values and published constants.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import twin
from golden_data import CHECKPOINT, IMAGE, RUNS, difference, differences, golden, same_bits
from PIL import Image


@pytest.fixture(scope="module")
def checkpoint() -> twin.Checkpoint:
    return twin.load_checkpoint(CHECKPOINT)


@pytest.fixture(scope="module")
def text_run(checkpoint: twin.Checkpoint) -> dict[str, torch.Tensor]:
    expected = golden("text")
    return twin.forward(checkpoint, expected["tokens"].tolist(), drafts_from=int(expected["prompt_length"]))


@pytest.mark.parametrize("run", RUNS)
def test_twin_equals_the_released_code(run: str, checkpoint: twin.Checkpoint, request: pytest.FixtureRequest) -> None:
    expected = golden(run)
    if run == "text":
        actual = request.getfixturevalue("text_run")
    else:
        images = [Image.open(IMAGE)] if run == "image" else []
        actual = twin.forward(checkpoint, expected["tokens"].tolist(), expected.get("token_types"), images,
                              drafts_from=int(expected["prompt_length"]))
    assert differences(actual, expected) == []


def test_greedy_tokens_of_the_recording_are_the_argmax(text_run: dict[str, torch.Tensor]) -> None:
    prompt = int(golden("text")["prompt_length"])
    assert text_run["logits"][prompt - 1 : -1].argmax(-1).tolist() == text_run["tokens"][prompt:].tolist()


def test_engram_constants_of_the_tiny_checkpoint(text_run: dict[str, torch.Tensor]) -> None:
    expected = golden("engram")
    for name in ("primes", "multipliers", "offsets"):
        assert same_bits(text_run[f"engram.{name}"], expected[name]), name
    assert same_bits(text_run["token_map"], expected["token_map"])


def test_twin_imports_nothing_of_the_product() -> None:
    imported = set()
    for node in ast.walk(ast.parse(Path(twin.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    allowed = {"__future__", "dataclasses", "json", "math", "os", "typing", "unicodedata"}
    assert imported <= allowed | {"numpy", "torch", "PIL", "safetensors", "tokenizers"}


def test_replay_far_enough_equals_the_full_forward(checkpoint: twin.Checkpoint,
                                                   text_run: dict[str, torch.Tensor]) -> None:
    """5 decoder layers, window 16: 5 * 15 + 1 replayed tokens make the last position exact, 16 do not."""
    tokens = golden("text")["tokens"].tolist()
    exact = twin.forward(checkpoint, tokens, bounded_from=len(tokens) - 76)
    assert same_bits(exact["logits"][-1], text_run["logits"][-1])
    assert not same_bits(exact["logits"][0], text_run["logits"][-76])
    bounded = twin.forward(checkpoint, tokens, bounded_from=len(tokens) - 16)
    assert bounded["logits"].shape[0] == 16 and not same_bits(bounded["logits"][-1], text_run["logits"][-1])
    assert same_bits(bounded["layers.5.main_kv"], text_run["layers.5.main_kv"])


@pytest.mark.parametrize("kind", twin.QUANTISERS)
def test_every_quantiser_can_be_switched_off(kind: str, checkpoint: twin.Checkpoint,
                                             text_run: dict[str, torch.Tensor]) -> None:
    tokens = golden("text")["tokens"].tolist()[:60]  # long enough for the index to drop rows (top-k 24)
    actual = twin.forward(checkpoint, tokens, off=[kind])
    name = {"activations": "layers.0.ffn_out", "window_kv": "layers.0.window_kv", "main_kv": "layers.2.main_kv",
            "index_key": "layers.2.index_key", "index_query": "layers.2.index_query"}[kind]
    length = actual[name].shape[0]
    assert difference(actual[name], text_run[name][:length]) is not None
    assert difference(actual["layers.0.input"], text_run["layers.0.input"][:60]) is None


# ------------------------------------------------------------------------------------------------------------ formats


def all_bf16() -> torch.Tensor:
    """Every finite bf16 value."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[torch.isfinite(values)]


def test_tables_are_the_formats() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for table, dtype in ((twin.E4M3, torch.float8_e4m3fn), (twin.E8M0, torch.float8_e8m0fnu)):
        want = codes.view(dtype).to(torch.float64).numpy()
        assert np.array_equal(table, want, equal_nan=True)
        assert np.array_equal(np.signbit(table[:128]), np.signbit(want[:128]))
    assert twin.E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert math.copysign(1, twin.E2M1[8]) == -1


def test_e4m3_rounding_equals_the_cast_for_every_bf16_value() -> None:
    x = all_bf16()
    x = x[x.abs() <= 448]
    assert np.array_equal(twin.e4m3_codes(x.double().numpy()), x.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    x = np.array(list(ties))
    assert twin.E2M1[twin.e2m1_codes(x)].tolist() == list(ties.values())
    assert twin.E2M1[twin.e2m1_codes(-x)].tolist() == [-v for v in ties.values()]
    beside = np.nextafter(np.concatenate([x, x]), np.repeat([0.0, 9.0], len(x)))
    nearest = [min(twin.E2M1[:8], key=lambda v: abs(v - b)) for b in beside]
    assert twin.E2M1[twin.e2m1_codes(beside)].tolist() == nearest
    assert twin.e2m1_codes(np.array([-0.0, -0.2, 0.0, 7.0])).tolist() == [8, 8, 0, 7]


def test_bf16_goes_through_float32() -> None:
    x = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3.0
    x[:4] = torch.tensor([-0.0, math.inf, 3.4e38, -1e300])
    x[4] = 1 + 2**-8 + 2**-40  # above a bf16 tie, on it after float32: down to even; directly it would go up
    rounded = twin.bf16(x.numpy())
    assert same_bits(torch.from_numpy(rounded), x.to(torch.float32).to(torch.bfloat16).double())
    assert rounded[4] == 1.0
    assert math.isnan(twin.bf16(np.array([math.nan]))[0])


@pytest.mark.parametrize("exponent", [-20, -3, 0, 5, 100])
def test_power_of_two_scales(exponent: int) -> None:
    for largest in (448.0, 6.0):
        inverse = np.float32(1 / largest)
        amax = largest * 2.0**exponent
        above = float(torch.tensor(amax, dtype=torch.float32).nextafter(torch.tensor(math.inf)))
        assert twin.pow2_scale(np.array([amax]), inverse)[0] == 2.0**exponent  # exactly full: not one step more
        assert twin.pow2_scale(np.array([above * (1 + 2**-7)]), inverse)[0] == 2.0 ** (exponent + 1)


def test_quantiser_floors_and_zero_blocks() -> None:
    zero, minus = np.zeros(32), -np.zeros(32)
    for quantise, floor in ((twin.quantise_fp8, 2.0**-22), (twin.quantise_fp4, 2.0**-126),
                            (twin.quantise_fp4_main, 2.0**-9)):
        assert set(quantise(zero).scales.tolist()) == {floor}
        assert np.array_equal(np.signbit(quantise(minus).values), np.ones(32, bool))  # the sign of zero is kept
        assert not np.signbit(quantise(zero).values).any() and not quantise(zero).values.any()


def test_main_kv_scale_is_a_rounded_quotient_and_values_are_clamped() -> None:
    x = np.zeros(16)
    x[:3] = 10.0, -2.0, 0.5  # 10 / 6 = 1.667 -> 1.625 in E4M3; 10 / 1.625 = 6.15 is clamped to 6
    q = twin.quantise_fp4_main(x)
    assert q.scales.tolist() == [1.625]
    assert q.values[:3].tolist() == [9.75, -1.625 * 1.0, 0.8125]
    x[:3] = 7.5 * 2.0**-9, 0.0, 0.0  # 1.25 steps of the least subnormal round to one: the quotient is 7.5
    assert twin.quantise_fp4_main(x).values[0] == 6 * 2.0**-9


def test_fp8_values_are_idempotent_and_scale_per_32() -> None:
    x = twin.bf16(np.random.default_rng(1).normal(size=(5, 96)) * 2.0 ** np.arange(-4, 92).clip(-4, 4))
    x[0, :32] = 0.0
    x[0, 0] = 448 * 2.0**3
    q = twin.quantise_fp8(x)
    assert q.scales.shape == (5, 3) and q.scales[0, 0] == 8.0
    assert np.array_equal(twin.quantise_fp8(q.values).values, q.values)
    assert np.abs(q.values - x).max() <= np.abs(x).max() / 16


# ------------------------------------------------------------------------------------------- published constants


def test_released_engram_primes_and_multipliers() -> None:
    primes = twin.engram_primes([1, 14], 4, 16_000_000, 8)
    assert primes[0][0] == [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183]
    assert [sum(map(sum, layer)) for layer in primes] == [384006168, 384016682]  # the rows of the published tables
    assert twin.engram_multipliers(1, 4, 99092) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert twin.engram_multipliers(14, 4, 99092) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_released_resize_plans() -> None:
    vision = {"patch_size": 14, "downsample_ratio": 3, "max_image_tokens": 1024, "min_pixels": 295936}
    examples = {(640, 480): (12, 16, 490, 644), (100, 100): (13, 13, 546, 546), (3000, 2000): (25, 38, 1050, 1568),
                (1344, 1344): (31, 31, 1302, 1302), (4000, 100): (3, 96, 112, 4004), (100, 20000): (200, 1, 8400, 42)}
    for (width, height), plan in examples.items():
        assert twin.resize_plan(width, height, vision) == plan
        assert plan[0] * (plan[1] + 1) + 2 <= 1024
