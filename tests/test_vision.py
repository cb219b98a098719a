"""Vision: the recorded image run bit for bit, the resize plan, every kind of image file, slow twins in Python loops."""
from __future__ import annotations

import base64
import io
import json
import math
import struct
import urllib.error
import urllib.parse
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import twin
import vision
from golden_data import CHECKPOINT, IMAGE, difference, golden
from PIL import Image
from quant import Linear, Numerics
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vision import (Aligner, ImageInput, VisionAttention, VisionConfig, VisionMLP, VisionTower, image_span, load_image,
                    plan_image)

EXACT, FAST = Numerics(torch.float64), Numerics(torch.float32)
RELEASED = VisionConfig(num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816,
                        patch_size=14, rope_theta=10000.0, downsample_ratio=3, max_image_tokens=1024, min_pixels=295936)
SMALL = VisionConfig(num_hidden_layers=2, hidden_size=24, num_attention_heads=2, intermediate_size=20, patch_size=2,
                     rope_theta=100.0, downsample_ratio=3, max_image_tokens=40, min_pixels=64)


@pytest.fixture(scope="module")
def tiny_config() -> VisionConfig:
    published = json.loads((CHECKPOINT / "config.json").read_text())["vision_config"]
    return VisionConfig(**{k: v for k, v in published.items() if k != "model_type"})


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    out = {}
    for path in CHECKPOINT.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            out.update({k: file.get_tensor(k) for k in file.keys() if k.startswith(("vision.", "aligner."))})
    return out


def build(config: VisionConfig, weights: dict[str, Tensor], num: Numerics) -> tuple[VisionTower, Aligner]:
    tower, aligner = VisionTower(config, num), Aligner(config, weights["aligner.w2.weight"].shape[0], num)
    for module, prefix in ((tower, "vision."), (aligner, "aligner.")):
        module.load_state_dict({k[len(prefix):]: v for k, v in weights.items() if k.startswith(prefix)})  # strict
        for part in module.modules():
            if isinstance(part, Linear):
                part.prepare()
    return tower, aligner


def randomise(module: torch.nn.Module, seed: int, scale: float = 0.5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * scale)


def bf16_values(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16)


def rounded(rows: Any) -> Tensor:
    return torch.from_numpy(twin.bf16(np.array(rows))).to(torch.bfloat16)


def affine(x: list[float], module: Linear) -> list[float]:
    """One rounded row of a linear layer, summed exactly."""
    bias = module.bias.tolist() if module.bias is not None else [0.0] * module.weight.shape[0]
    return [float(twin.bf16(np.array(math.fsum([*map(float.__mul__, x, row)]) + b)))
            for row, b in zip(module.weight.tolist(), bias)]


# ---------------------------------------------------------------------------------------------------------- recordings

def test_the_recorded_image_run_bit_for_bit(tiny_config: VisionConfig, weights: dict[str, Tensor]) -> None:
    expected = golden("image")
    tower, aligner = build(tiny_config, weights, EXACT)
    image = load_image(IMAGE, tiny_config)
    assert image.grid == (8, 11) and image.llm_grid == (3, 4)
    vit = tower(image.patches, image.grid)
    for name, actual in (("patches", image.patches), ("types", image.span), ("vit", vit),
                         ("features", aligner(vit, image.grid))):
        assert difference(actual, expected[name]) is None, f"{name}: {difference(actual, expected[name])}"
    assert image.span.dtype == torch.int8


def test_fast_is_nearer_to_exact_than_an_ulp_of_noise_in_the_pixels(
        tiny_config: VisionConfig, weights: dict[str, Tensor]) -> None:
    image = load_image(IMAGE, tiny_config)
    tower, aligner = build(tiny_config, weights, EXACT)
    fast_tower, fast_aligner = build(tiny_config, weights, FAST)
    flips = (torch.rand(image.patches.shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(torch.int16)
    noisy = (image.patches.view(torch.int16) + flips).view(torch.bfloat16)
    exact = tower(image.patches, image.grid)
    floor = tower(noisy, image.grid)
    fast = fast_tower(image.patches, image.grid)
    assert torch.equal(fast, fast_tower(image.patches, image.grid))  # repeatable

    def distance(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b.double()).norm() / b.double().norm()).item()

    assert 0 < distance(fast, exact) < distance(floor, exact)  # 0.6 % against 1.1 %
    features = aligner(exact, image.grid)
    assert distance(fast_aligner(fast, image.grid), features) < distance(aligner(floor, image.grid), features)


def test_parameters_have_the_published_names_shapes_and_dtypes(
        tiny_config: VisionConfig, weights: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        modules = {"vision": VisionTower(tiny_config, EXACT), "aligner": Aligner(tiny_config, 160, EXACT)}
    ours = {f"{a}.{b}": (t.shape, t.dtype) for a, m in modules.items() for b, t in m.state_dict().items()}
    assert ours == {k: (t.shape, t.dtype) for k, t in weights.items()}
    assert not any(p.requires_grad for m in modules.values() for p in m.parameters())


# --------------------------------------------------------------------------------------------------------- resize plan

def test_plans_of_the_released_settings() -> None:
    rows = json.loads((Path(__file__).parent / "data" / "image_plan.json").read_text())
    assert len(rows) == 113
    for row in rows:
        plan = plan_image(row["width"], row["height"], RELEASED)
        assert plan == (row["n_llm_h"], row["n_llm_w"], row["resized_height"], row["resized_width"]), row
        assert len(image_span(*plan[:2])) == row["tokens"]


@pytest.mark.parametrize("config", [
    RELEASED, SMALL, replace(SMALL, max_image_tokens=4),
    replace(SMALL, min_pixels=3000),  # images that grow first and then shrink, which the released settings never do
])
def test_plans_of_random_sizes_keep_the_budget_and_equal_the_twin(config: VisionConfig) -> None:
    generator = np.random.default_rng(3)
    for width, height in np.exp(generator.uniform(0, 12, (3000, 2))).astype(int).tolist():
        n_h, n_w, resized_height, resized_width = plan_image(width, height, config)
        assert n_h >= 1 and n_w >= 1 and n_h * (n_w + 1) + 2 <= config.max_image_tokens, (width, height)
        assert resized_height % config.patch_size == resized_width % config.patch_size == 0
        plan = n_h, n_w, resized_height, resized_width
        assert plan == twin.resize_plan(width, height, vars(config)), (width, height)


@pytest.mark.parametrize("width, height", [(0, 5), (5, 0), (-3, 4)])
def test_a_plan_needs_pixels(width: int, height: int) -> None:
    with pytest.raises(ValueError, match=f"{width} x {height} pixels"):
        plan_image(width, height, RELEASED)


@pytest.mark.parametrize("change, message", [
    ({"hidden_size": 1032}, "hidden_size = 1032"), ({"patch_size": 0}, "patch_size = 0"),
    ({"max_image_tokens": 3}, "least span"), ({"max_wh_ratio": 20.0}, "max_wh_ratio = 20.0"),
])
def test_a_config_that_cannot_be_computed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RELEASED, **change)


def test_span_of_two_rows_of_three() -> None:
    assert image_span(2, 3).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]


# -------------------------------------------------------------------------------------------------------------- pixels

def noise(width: int, height: int, channels: int = 3) -> Image.Image:
    shape = (height, width, channels)
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, shape, dtype=np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def assert_is(actual: ImageInput, expected: Image.Image, config: VisionConfig = SMALL) -> None:
    """`actual` is cut from the same pixels as the RGB image `expected`, by the twin."""
    assert expected.mode == "RGB"
    n_llm_h, n_llm_w, height, width = twin.resize_plan(*expected.size, vars(config))
    patches = torch.from_numpy(twin.image_patches(expected, height, width, config.patch_size)).to(torch.bfloat16)
    assert actual.llm_grid == (n_llm_h, n_llm_w)
    assert actual.grid == (height // config.patch_size, width // config.patch_size)
    assert difference(actual.patches, patches) is None


@pytest.mark.parametrize("size", [(1, 1), (43, 43), (1, 5000), (5000, 1), (42882, 42), (130, 40), (640, 480)])
def test_pixels_of_extreme_sizes(size: tuple[int, int]) -> None:
    assert_is(load_image(noise(*size), RELEASED), noise(*size), RELEASED)


def test_every_level_of_a_channel_is_scaled_in_float32() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    config = replace(SMALL, patch_size=1, max_image_tokens=10_000)  # 16 x 16 stays as it is
    actual = load_image(Image.fromarray(np.stack([levels, levels.T, 255 - levels], -1)), config).patches
    scaled = [rounded(np.float32(np.float32(np.float32(v) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)))
              for v in range(256)]
    assert torch.equal(actual[:, 0, 0, 0], torch.stack(scaled))
    assert torch.equal(actual[:, 2, 0, 0], torch.stack(scaled).flip(0))
    assert torch.equal(actual[:, 1, 0, 0], torch.stack(scaled).view(16, 16).T.flatten())


def test_an_image_of_another_shape_is_centred_on_grey() -> None:
    plan = plan_image(1, 5000, RELEASED)
    image = load_image(Image.new("RGB", (1, 5000), (255, 0, 0)), RELEASED)
    row = image.patches.view(plan[2] // 14, 3, 3, 14, 14)[700, :, :, 7].transpose(1, 2).flatten(0, 1)  # [42, 3]
    grey = rounded(np.float32(127) / np.float32(255) * 2 - 1)
    assert (row[:19] == grey).all() and (row[23:] == grey).all()  # a strip of 4 pixels between
    assert (row[19:23] == torch.tensor([1.0, -1.0, -1.0])).all()


@pytest.mark.parametrize("kind, options", [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})])
def test_every_way_to_hand_over_an_image(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    image = noise(13, 9)
    data = encoded(image, kind, **options)
    path = tmp_path / "no suffix needed"
    path.write_bytes(data)
    data_url = "data:image/x;base64," + base64.b64encode(data).decode()
    percent_url = "DATA:," + urllib.parse.quote_from_bytes(data)
    for source in (path, str(path), data, bytearray(data), image, Image.open(path), data_url, percent_url):
        assert_is(load_image(source, SMALL), image)


def test_modes_follow_the_released_conversion() -> None:
    rgb, rgba = noise(17, 11), noise(17, 11, 4)
    pixels = np.asarray(rgba)
    opaque = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    assert_is(load_image(encoded(rgba, "PNG"), SMALL), opaque)                       # alpha dropped, whatever it was
    grey = np.asarray(rgb)[..., 0]
    triple = Image.fromarray(np.stack([grey] * 3, -1))
    assert_is(load_image(encoded(Image.fromarray(grey), "PNG"), SMALL), triple)
    with_alpha = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(pixels[..., 3].copy())])
    assert_is(load_image(encoded(with_alpha, "PNG"), SMALL), triple)
    palette = rgb.quantize(7)
    colours = np.array(palette.getpalette(), dtype=np.uint8).reshape(-1, 3)[np.asarray(palette)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")                                               # no remark on transparency
        for options in ({}, {"transparency": 2}, {"transparency": bytes(range(7))}):
            assert_is(load_image(encoded(palette, "PNG", **options), SMALL), Image.fromarray(colours))
        assert_is(load_image(encoded(palette, "GIF", save_all=True, append_images=[palette.rotate(180)]), SMALL),
                  Image.fromarray(colours))                                          # the first frame
    bits = grey > 99
    assert_is(load_image(encoded(Image.fromarray(bits), "PNG"), SMALL),
              Image.fromarray(np.stack([bits] * 3, -1).astype(np.uint8) * 255))
    cmyk = np.random.default_rng(1).integers(0, 120, (11, 17, 4), dtype=np.uint8)
    ink = encoded(Image.frombytes("CMYK", (17, 11), cmyk.tobytes()), "TIFF")
    paper = (255 - cmyk[..., :3].astype(float)) * (255 - cmyk[..., 3:].astype(float)) / 255
    converted = Image.open(io.BytesIO(ink)).convert("RGB")
    assert np.abs(np.asarray(converted) - paper).max() <= 1                          # what the conversion means
    assert_is(load_image(ink, SMALL), converted)


@pytest.mark.parametrize(
    "dtype, kind", [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF"), (np.float32, "TIFF")])
def test_deep_greyscale_clips_to_white_with_a_warning(dtype: type, kind: str, tmp_path: Path) -> None:
    levels = np.array([0, 1, 100, 254, 255, 256, 300, 65535] * 8, dtype=dtype).reshape(8, 8)
    (tmp_path / "deep").write_bytes(encoded(Image.fromarray(levels), kind))
    with pytest.warns(UserWarning, match="deep has more than 8 bits per pixel.*become white"):
        image = load_image(tmp_path / "deep", SMALL)
    assert_is(image, Image.fromarray(np.stack([levels.clip(max=255).astype(np.uint8)] * 3, -1)))


def test_orientation_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image = noise(23, 7)
    assert Image.open(io.BytesIO(encoded(image, "PNG", exif=exif))).getexif()[0x0112] == 6
    assert_is(load_image(encoded(image, "PNG", exif=exif), SMALL), image)


# ----------------------------------------------------------------------------------------------------------- bad input

def png_header(width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


PNG, JPEG = encoded(noise(40, 30), "PNG"), encoded(noise(40, 30), "JPEG")
BAD_FILES = {
    "empty.png": (b"", "is empty"),
    "text.png": (b"this is no image\n" * 50, "is not an image"),
    "truncated.png": (PNG[: len(PNG) // 2], "cannot be decoded"),
    "truncated.jpg": (JPEG[: len(JPEG) // 2], "cannot be decoded"),
    "header only.png": (PNG[:33], "is not an image in a format"),
    "flipped.png": (PNG[:60] + b"\xff\x00\xff" + PNG[63:], "cannot be decoded"),
    "bomb.png": (png_header(40_000, 40_000) + PNG[33:], "too many pixels"),
    "large.png": (png_header(10_000, 10_000) + PNG[33:], "cannot be decoded"),  # allowed, but the data is not there
    "no pixels.png": (png_header(0, 7) + PNG[33:], "is not an image"),
}


def assert_one_sentence(error: pytest.ExceptionInfo[ValueError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message and "object at 0x" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_get_one_sentence_naming_the_file(name: str, tmp_path: Path) -> None:
    data, reason = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError) as error:
            load_image(path, RELEASED)
        assert_one_sentence(error, str(path), reason)
        with pytest.raises(ValueError) as error:
            load_image(data, RELEASED)
        assert_one_sentence(error, f"image of {len(data)} bytes", reason)


@pytest.mark.parametrize("source, parts", [
    ("nothing here.png", ["there is no image file nothing here.png"]), ("nul\0.png", ["cannot be opened"]),
    (str(Path(__file__).parent), [str(Path(__file__).parent), "cannot be opened"]), ("", ["an empty path"]),
    ("data:image/png;base64", ["data: URL"]), ("data:image/png;base64,A", ["base64"]), ("data:,", ["is empty"]),
    ("data:,hello", ["data:,hello is not an image"]), (7, ["not int"]), (None, ["not NoneType"]),
    ("https://example.org/a.png", ["https://example.org/a.png is not fetched"]),
    ("HTTP://example.org", ["is not fetched"]), (Image.new("RGB", (0, 3)), ["the image has no pixels"]),
    (Image.new("La", (3, 3)), ["the image cannot be decoded"]),
])
def test_bad_sources_get_one_sentence(source: Any, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision.urllib.request, "urlopen", lambda *a, **k: pytest.fail("network access"))
    with pytest.raises(ValueError) as error:
        load_image(source, RELEASED)
    assert_one_sentence(error, *parts)


def test_the_pixel_limit_holds_for_pillow_images_and_whatever_pillow_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ValueError, match="too many pixels: 40000 x 40000"):
        load_image(png_header(40_000, 40_000) + PNG[33:], RELEASED)
    monkeypatch.setattr(vision, "MAX_PIXELS", 99)
    load_image(noise(9, 11), SMALL)
    with pytest.raises(ValueError, match="the image has too many pixels: 10 x 10, the limit is 99"):
        load_image(noise(10, 10), SMALL)


def test_urls_are_fetched_only_when_allowed_and_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(PNG))
    assert_is(load_image("http://example.org/x", SMALL, allow_urls=True), noise(40, 30))
    monkeypatch.setattr(vision, "MAX_DOWNLOAD", len(PNG) - 1)
    with pytest.raises(ValueError, match="http://example.org/x is larger than"):
        load_image("http://example.org/x", SMALL, allow_urls=True)

    def unreachable(url: str, timeout: float) -> None:
        raise urllib.error.URLError("no route\nto host")

    monkeypatch.setattr(vision.urllib.request, "urlopen", unreachable)
    with pytest.raises(ValueError) as error:
        load_image("http://example.org/x", SMALL, allow_urls=True)
    assert_one_sentence(error, "http://example.org/x cannot be fetched", "no route to host")


# ------------------------------------------------------------------------------------- slow twins of tower and aligner

def loop_rotary(x: list[list[list[float]]], n_w: int, theta: float) -> list[list[list[float]]]:
    """[n][H][hd], one pair after the other: pair i is dims (i, i + hd/2); its first quarter hd/4 counts rows."""
    hd = len(x[0][0])
    out = [[list(head) for head in heads] for heads in x]
    for patch, heads in enumerate(x):
        for h, head in enumerate(heads):
            for i in range(hd // 2):
                position = patch // n_w if i < hd // 4 else patch % n_w
                frequency = np.float32(theta ** (-2 * (i % (hd // 4)) / (hd // 2)))
                angle = float(np.float32(position) * frequency)
                a, b = head[i], head[i + hd // 2]
                out[patch][h][i] = a * math.cos(angle) - b * math.sin(angle)
                out[patch][h][i + hd // 2] = b * math.cos(angle) + a * math.sin(angle)
    return twin.bf16(np.array(out)).tolist()


@pytest.mark.parametrize("grid, hd", [((3, 5), 12), ((7, 2), 64), ((1, 900), 8)])
def test_rotary_turns_half_split_pairs_by_row_and_column(grid: tuple[int, int], hd: int) -> None:
    x = bf16_values((grid[0] * grid[1], 3, hd), 1)
    cos, sin = vision.rotary_2d(grid, hd, 10000.0, EXACT)
    actual = vision.rotate_half_split(x, cos, sin)
    assert difference(actual, rounded(loop_rotary(x.tolist(), grid[1], 10000.0))) is None


def test_rows_turn_dims_0_to_15_and_32_to_47_of_a_released_head() -> None:
    x = bf16_values((6, 1, 64), 2)
    row = {*range(0, 16), *range(32, 48)}
    for grid, turned in (((6, 1), row), ((1, 6), set(range(64)) - row)):
        changed = vision.rotate_half_split(x, *vision.rotary_2d(grid, 64, 10000.0, EXACT))[5, 0] != x[5, 0]
        assert set(changed.nonzero().flatten().tolist()) <= turned and changed.sum() > 20


def test_angles_are_float32_products() -> None:
    cos, _ = vision.rotary_2d((1, 3063), 64, 10000.0, EXACT)  # the widest grid
    assert cos.dtype == torch.float64
    worst = 0.0
    for j in range(16):
        angle = float(np.float32(3062) * np.float32(10000.0 ** (-j / 16)))
        assert abs(cos[3062, 16 + j].item() - math.cos(angle)) < 1e-14
        worst = max(worst, abs(math.cos(3062 * 10000.0 ** (-j / 16)) - math.cos(angle)))
    assert worst > 1e-5  # float64 angles are another model


def loop_attention(module: VisionAttention, x: Tensor, n_w: int, theta: float) -> Tensor:
    n, width, heads = len(x), x.shape[1], module.n_heads
    hd = width // heads
    projected = [affine(row, module.wqkv) for row in x.tolist()]
    q, k, v = ([[row[part * width + h * hd : part * width + (h + 1) * hd] for h in range(heads)] for row in projected]
               for part in range(3))
    q, k = loop_rotary(q, n_w, theta), loop_rotary(k, n_w, theta)
    out = []
    for i in range(n):
        o = []
        for h in range(heads):
            weight = [math.exp(sum(a * b for a, b in zip(q[i][h], k[j][h])) / math.sqrt(hd)) for j in range(n)]
            o += [math.fsum(weight[j] * v[j][h][d] for j in range(n)) / math.fsum(weight) for d in range(hd)]
        out.append(affine(twin.bf16(np.array(o)).tolist(), module.wo))
    return rounded(out)


def loop_mlp(module: VisionMLP, x: Tensor) -> Tensor:
    out = []
    for row in x.tolist():
        both = affine(row, module.w1)
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        silu = twin.bf16(np.array([g / (1 + math.exp(-g)) for g in gate])).tolist()
        out.append(affine(twin.bf16(np.array([s * u for s, u in zip(silu, up)])).tolist(), module.w2))
    return rounded(out)


def loop_norm(x: Tensor, weight: Tensor) -> Tensor:
    out = []
    for row in x.tolist():
        size = math.sqrt(math.fsum(v * v for v in row) / len(row) + 1e-6)
        out.append([w * v / size for w, v in zip(weight.tolist(), row)])
    return rounded(out)


def plus(x: Tensor, y: Tensor) -> Tensor:
    return rounded([[a + b for a, b in zip(*rows)] for rows in zip(x.tolist(), y.tolist())])


@pytest.mark.parametrize("grid", [(3, 5), (4, 2)])
def test_tower_equals_loops(grid: tuple[int, int]) -> None:
    tower = VisionTower(SMALL, EXACT)
    randomise(tower, 5)
    patches = bf16_values((grid[0] * grid[1], 3, 2, 2), 6)
    x = rounded([affine(row, tower.patch_embed.proj) for row in patches.flatten(1).tolist()])
    x[3] *= 1e-3  # a row so small that eps counts
    for block in tower.blocks:
        normed = loop_norm(x, block.norm1.weight)
        assert difference(block.norm1(x), normed) is None
        attended = loop_attention(block.attn, normed, grid[1], SMALL.rope_theta)
        cos, sin = vision.rotary_2d(grid, 12, SMALL.rope_theta, EXACT)
        assert difference(block.attn(normed, cos, sin), attended) is None
        middle = plus(x, attended)
        normed = loop_norm(middle, block.norm2.weight)
        fed = loop_mlp(block.mlp, normed)
        assert difference(block.mlp(normed), fed) is None
        assert difference(block(x, cos, sin), plus(middle, fed)) is None
        x = plus(middle, fed)
    unscaled = rounded([affine(row, tower.patch_embed.proj) for row in patches.flatten(1).tolist()])
    expected = loop_norm(tower.blocks[1](tower.blocks[0](unscaled, cos, sin), cos, sin), tower.norm.weight)
    assert difference(tower(patches, grid), expected) is None


@pytest.mark.parametrize("grid", [(3, 6), (4, 7), (5, 2), (1, 1)])
def test_aligner_equals_loops(grid: tuple[int, int]) -> None:
    (n_h, n_w), r = grid, 3
    aligner = Aligner(SMALL, 10, EXACT)
    randomise(aligner, 7, 0.3)
    vit = bf16_values((n_h * n_w, 24), 8)
    rows = []
    for top in range(0, n_h, r):
        for left in range(0, n_w, r):
            cell = [vit[y * n_w + x, c].item() if y < n_h and x < n_w else 0.0
                    for c in range(24) for y in range(top, top + r) for x in range(left, left + r)]
            hidden = [0.5 * u * math.erfc(-u / math.sqrt(2)) for u in affine(cell, aligner.w1)]
            rows.append(affine(twin.bf16(np.array(hidden)).tolist(), aligner.w2))
    assert difference(aligner(vit, grid), rounded(rows)) is None


@pytest.mark.parametrize("num", [EXACT, FAST])
def test_gelu_keeps_its_digits_in_the_lower_tail(num: Numerics) -> None:
    aligner = Aligner(replace(SMALL, hidden_size=8, num_attention_heads=1, downsample_ratio=1), 8, num)
    for linear in (aligner.w1, aligner.w2):
        linear.weight.copy_(torch.eye(8))
        linear.bias.zero_()
    x = torch.tensor([[-9.0, -8.5, -7.0, -5.0, -3.0, -1.0, 0.5, 4.0]]).to(torch.bfloat16)
    expected = rounded([[0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x[0].tolist()]])
    torch.testing.assert_close(aligner(x, (1, 1)), expected, rtol=0 if num is EXACT else 2**-7, atol=0)


def test_patches_must_fill_the_grid() -> None:
    with pytest.raises(ValueError, match="12 patches do not fill a grid of 3 x 5"):
        VisionTower(SMALL, EXACT)(bf16_values((12, 3, 2, 2), 1), (3, 5))


# -------------------------------------------------------------------------------------------------------------- memory

class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.bytes = max(self.bytes, out.numel() * out.element_size())
        return out


def test_memory_of_the_largest_image_is_linear_in_its_patches() -> None:
    n = 96 * 96  # 1,024 cells of 3 x 3
    with torch.device("meta"):
        attention = VisionAttention(RELEASED, EXACT)
        x, cos, sin = torch.empty(n, 1024, dtype=torch.bfloat16), *vision.rotary_2d((96, 96), 64, 10000.0, EXACT)
        with Largest() as largest:
            assert attention(x, cos, sin).shape == (n, 1024)
    assert largest.bytes == n * 3 * 1024 * 8  # q, k and v together; one head's scores alone would be three times that


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = VisionAttention(SMALL, EXACT)
    randomise(attention, 9)
    x, (cos, sin) = bf16_values((35, 24), 10), vision.rotary_2d((5, 7), 12, 100.0, EXACT)
    whole = attention(x, cos, sin)
    for limit in (1, 300, 2 * 35 * 17):  # blocks of 1, 4 and 17 queries
        monkeypatch.setattr(vision, "MAX_SCORES", limit)
        assert torch.equal(attention(x, cos, sin), whole)
