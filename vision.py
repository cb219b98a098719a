"""Vision of DeepSeek-V4.1-Flash: from an image file to the rows that replace embeddings in the token stream.

    plan_image, load_image     the resize plan, then pixels -> patches of 14 x 14, in reading order
    VisionTower                a ViT at the image's own resolution: half-split 2-D rotary, full attention in one image
    Aligner                    3 x 3 patches -> one row of the backbone's width D (a 2-layer MLP)
    image_span                 the span in the token stream: START, rows of IMAGE closed by NEWLINE, END

Every position of a span carries the image token id; the backbone overwrites the embeddings there, routes the whole span
with its own expert bias and keeps Engram out of it (model.py). What is unusual: a rotary that turns the pairs
(i, i + hd/2), half of them by the patch's row and half by its column, where the backbone turns adjacent pairs; and a
token budget that counts the delimiters. In this file images know neither of each other nor of the text.

Letters: n patches of one image (n_h x n_w), H heads, hd head width, C tower width, D backbone width.
"""
from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import io
import math
import os
import urllib.parse
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from quant import Linear, Numerics, RMSNorm, to_bf16

TEXT, IMAGE_START, IMAGE, IMAGE_NEWLINE, IMAGE_END = -1, 0, 1, 2, 3  # token types; >= 0 is inside a span

NORM_EPS = 1e-6              # the backbone's norms use another
MAX_PIXELS = 178_956_970     # before decoding: where Pillow refuses by default, twice its MAX_IMAGE_PIXELS
MAX_DOWNLOAD = 64 * 2**20    # bytes
MAX_SCORES = 2**23           # attention scores held at once, all heads: 64 MiB in float64


@dataclass(frozen=True)
class VisionConfig:
    """The published vision_config; a ValueError names the key that does not fit. Pixel sizes are those of the image."""
    num_hidden_layers: int
    hidden_size: int                    # C
    num_attention_heads: int            # H
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int               # patches along each side of one backbone row
    max_image_tokens: int               # of a whole span, delimiters included
    min_pixels: int
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size",
                    "rope_theta", "downsample_ratio"):
            if getattr(self, key) < 1:
                raise ValueError(f"vision_config.{key} = {getattr(self, key)} must be at least 1")
        if self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(f"vision_config.hidden_size = {self.hidden_size}: each of num_attention_heads = "
                             f"{self.num_attention_heads} heads needs a multiple of 4 channels for the 2-D rotary")
        if self.max_image_tokens < 4:
            raise ValueError(f"vision_config.max_image_tokens = {self.max_image_tokens}: the least span has 4 tokens")
        if self.max_wh_ratio is not None:
            raise ValueError(f"vision_config.max_wh_ratio = {self.max_wh_ratio!r}; this model computes None only")


# ------------------------------------------------------------------------------------------------ resize plan and span

def plan_image(width: int, height: int, vision_config: VisionConfig) -> tuple[int, int, int, int]:
    """The resize plan of a width x height image: (n_llm_h, n_llm_w, resized_height, resized_width): rows of IMAGE
    tokens, IMAGE tokens in a row, and pixels. ValueError for an image without pixels. (Numerics contract, vision.)"""
    c = vision_config
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels has nothing to see")
    patch, cell, budget = c.patch_size, c.patch_size * c.downsample_ratio, c.max_image_tokens

    def tokens(pixels: int) -> int:
        return math.ceil(pixels // patch / c.downsample_ratio)

    w, h = width, height
    if w * h < c.min_pixels:  # small images grow to the least area
        scale = math.sqrt(c.min_pixels / (w * h))
        w, h = int(w * scale), int(h * scale)
    best_w, best_h = math.ceil(w / patch) * patch, math.ceil(h / patch) * patch
    if tokens(best_h) * (tokens(best_w) + 1) + 2 > budget:
        # Shrink to the largest max_h x max_w cells of the same shape with max_h * (max_w + 1) + 2 = budget; the one
        # column more is the NEWLINE of each row.
        ratio = h / w
        max_w = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
        max_h = max_w * ratio
        if max_w < 1:
            best_w, best_h = cell, (budget - 2) // 2 * cell
        elif max_h < 1:
            best_w, best_h = (budget - 3) * cell, cell
        else:
            beta = min(math.floor(max_w) * cell / w, math.floor(max_h) * cell / h)
            best_w, best_h = math.floor(w * beta / patch) * patch, math.floor(h * beta / patch) * patch
    return tokens(best_h), tokens(best_w), best_h, best_w


def image_span(n_llm_h: int, n_llm_w: int) -> Tensor:
    """Token types of one image's span, int8 [n_llm_h * (n_llm_w + 1) + 2]."""
    row = [IMAGE] * n_llm_w + [IMAGE_NEWLINE]
    return torch.tensor([IMAGE_START] + row * n_llm_h + [IMAGE_END], dtype=torch.int8)


# -------------------------------------------------------------------------------------------------- pixels and patches

@dataclass(frozen=True)
class ImageInput:
    """One image, ready for the tower."""
    patches: Tensor               # bfloat16 [n, 3, patch, patch], reading order, channel first, -1..1
    grid: tuple[int, int]         # (n_h, n_w), patches
    llm_grid: tuple[int, int]     # (n_llm_h, n_llm_w), IMAGE tokens

    @property
    def span(self) -> Tensor:
        """Token types of its span, int8."""
        return image_span(*self.llm_grid)

    @property
    def digest(self) -> bytes:
        """SHA-256 of its pixels: what tells images apart, whose tokens all have one id."""
        return hashlib.sha256(self.patches.view(torch.int16).numpy().tobytes()).digest()


def load_image(source: str | os.PathLike[str] | bytes | Image.Image, vision_config: VisionConfig,
               allow_urls: bool = False) -> ImageInput:
    """Read an image and cut it into patches, on the CPU.

    `source` is a path, the bytes of a file, a Pillow image, a data: URL, or with `allow_urls` an http(s) URL. A
    ValueError of one sentence names what cannot be read, is no image, is damaged or too large. Deep greyscale clips to
    white as in the released model, with a warning. (Numerics contract, vision.)
    """
    if isinstance(source, Image.Image):
        return _patches(source, getattr(source, "filename", "") or "the image", vision_config)
    name, file = _locate(source, allow_urls)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # at half of MAX_PIXELS
            opened = Image.open(file)
    except FileNotFoundError:
        raise ValueError(f"there is no image file {name}") from None
    except UnidentifiedImageError:
        raise ValueError(f"{name} is not an image in a format that Pillow {Image.__version__} can open") from None
    except Image.DecompressionBombError:
        raise ValueError(f"{name} has too many pixels: the limit is {MAX_PIXELS:,}") from None
    except Exception as error:  # on damaged headers Pillow's readers raise nearly everything
        raise ValueError(f"{name} cannot be opened as an image: {_reason(error)}") from None
    with opened:
        return _patches(opened, name, vision_config)


def _patches(image: Image.Image, name: str, c: VisionConfig) -> ImageInput:
    if image.width * image.height == 0:
        raise ValueError(f"{name} has no pixels")
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{name} has too many pixels: {image.width} x {image.height}, the limit is {MAX_PIXELS:,}")
    n_llm_h, n_llm_w, height, width = plan_image(image.width, image.height, c)
    if image.mode.startswith("I") or image.mode == "F":
        warnings.warn(f"{name} has more than 8 bits per pixel (mode {image.mode}): as in the released model, values "
                      f"above 255 become white", stacklevel=3)
    try:
        # Alpha is dropped, not blended; the EXIF orientation is ignored; CMYK is converted without a profile.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the transparency of palettes
            rgb = image.convert("RGB")
    except Exception as error:  # decoding happens here: truncated data, unsupported modes
        raise ValueError(f"{name} cannot be decoded: {_reason(error)}") from None
    try:
        rgb = ImageOps.pad(rgb, (width, height), color=(127, 127, 127))  # bicubic fit, centred
    except ValueError:  # Pillow before 13; later ones keep one pixel
        raise ValueError(f"{name} is too narrow: {image.width} x {image.height} pixels leave no side when fitted to "
                         f"{width} x {height}") from None
    x = torch.from_numpy(np.array(rgb)).to(torch.float32) / 255                                # [height, width, 3]
    x = to_bf16((x - 0.5) / 0.5)
    n_h, n_w, p = height // c.patch_size, width // c.patch_size, c.patch_size
    x = x.view(n_h, p, n_w, p, 3).permute(0, 2, 4, 1, 3).reshape(n_h * n_w, 3, p, p)           # [n, 3, p, p]
    return ImageInput(x, (n_h, n_w), (n_llm_h, n_llm_w))


def _locate(source: str | os.PathLike[str] | bytes, allow_urls: bool) -> tuple[str, Path | io.BytesIO]:
    """What errors call the source, and what Pillow opens."""
    if isinstance(source, (bytes, bytearray)):
        name, data = f"the image of {len(source)} bytes", bytes(source)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        name, data = f"the image {source[:40]}{'...' if len(source) > 40 else ''}", _data_url(source)
    elif isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        if not allow_urls:
            raise ValueError(f"{source} is not fetched: network access is off unless allow_urls is given")
        name, data = source, _download(source)
    elif isinstance(source, (str, os.PathLike)):
        if os.path.isfile(source) and os.path.getsize(source) == 0:
            raise ValueError(f"{os.fspath(source)} is empty: an image was expected")
        if os.path.exists(source) and not os.path.isfile(source) and not os.path.isdir(source):    # a pipe would never end
            raise ValueError(f"{os.fspath(source)} is no regular file: an image was expected")
        return os.fspath(source) or "an empty path", Path(source)
    else:
        raise ValueError(f"an image is a path, bytes, a data: URL or a Pillow image, not {type(source).__name__}")
    if not data:
        raise ValueError(f"{name} is empty: an image was expected")
    return name, io.BytesIO(data)


def _data_url(url: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma:
        raise ValueError(f"the image {url[:40]} is not a data: URL: it has no comma")
    data = urllib.parse.unquote_to_bytes(payload)
    try:
        return base64.b64decode(data) if head.lower().endswith(";base64") else data
    except binascii.Error as error:
        raise ValueError(f"the image {head},... is not valid base64: {_reason(error)}") from None


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            data = reply.read(MAX_DOWNLOAD + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{url} cannot be fetched: {_reason(error)}") from None
    if len(data) > MAX_DOWNLOAD:
        raise ValueError(f"{url} is larger than {MAX_DOWNLOAD // 2**20} MiB")
    return data


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --------------------------------------------------------------------------------------------------------------- tower

def rotary_2d(grid: tuple[int, int], head_dim: int, theta: float, num: Numerics,
              device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin [n, hd/2] of every patch: the first quarter of a head's channels turns by its row, the second by its
    column, and the other half of the channels with them."""
    n_h, n_w = grid
    quarter = head_dim // 4
    # Frequencies in float64, rounded once to float32; the angle is one float32 product; only cos and sin are unrounded.
    frequencies = torch.tensor([theta ** (-j / quarter) for j in range(quarter)], dtype=torch.float32, device=device)
    rows = torch.arange(n_h, dtype=torch.float32, device=device).repeat_interleave(n_w)        # [n]
    columns = torch.arange(n_w, dtype=torch.float32, device=device).repeat(n_h)                # [n]
    angle = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], -1)       # [n, hd/2]
    angle = angle.to(num.arith)
    return angle.cos(), angle.sin()


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + hd/2) of x [n, H, hd] by the angles of cos, sin [n, hd/2]; rounded to bfloat16."""
    a, b = x.to(cos.dtype).chunk(2, -1)                                                        # [n, H, hd/2]
    cos, sin = cos[:, None], sin[:, None]                                                      # [n, 1, hd/2]
    return to_bf16(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))


class VisionAttention(nn.Module):
    """Full bidirectional attention among the patches of one image; probabilities are never rounded."""

    def __init__(self, c: VisionConfig, num: Numerics) -> None:
        super().__init__()
        self.num, self.n_heads = num, c.num_attention_heads
        self.wqkv = Linear(c.hidden_size, 3 * c.hidden_size, "bf16", num, bias=True)
        self.wo = Linear(c.hidden_size, c.hidden_size, "bf16", num, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:                          # x: [n, C]
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.n_heads, -1)).unbind(1)                  # each [n, H, hd]
        q, k = rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin)
        q, k, v = (t.to(self.num.arith).transpose(0, 1) for t in (q, k, v))                    # [H, n, hd]
        scale = q.shape[-1] ** -0.5
        # The largest image has some 9,200 patches: all its scores at once would be 10.8 GB in float64. Queries go in blocks.
        step = max(1, MAX_SCORES // (self.n_heads * len(x)))
        out = []
        for part in q.split(step, 1):                                                          # [H, step, hd]
            scores = part @ k.transpose(1, 2) * scale                                          # [H, step, n]
            out.append(to_bf16(scores.softmax(-1) @ v))                                        # [H, step, hd]
        return self.wo(torch.cat(out, 1).transpose(0, 1).flatten(1))                           # [n, C]


class VisionMLP(nn.Module):
    """SwiGLU without biases; w1 holds the gate's rows, then up's."""

    def __init__(self, c: VisionConfig, num: Numerics) -> None:
        super().__init__()
        self.num = num
        self.w1 = Linear(c.hidden_size, 2 * c.intermediate_size, "bf16", num)
        self.w2 = Linear(c.intermediate_size, c.hidden_size, "bf16", num)

    def forward(self, x: Tensor) -> Tensor:                                                    # [n, C]
        gate, up = self.w1(x).to(self.num.arith).chunk(2, -1)                                  # [n, intermediate]
        gate = to_bf16(F.silu(gate))
        return self.w2(to_bf16(gate.to(self.num.arith) * up))                                  # [n, C]


class VisionBlock(nn.Module):
    def __init__(self, c: VisionConfig, num: Numerics) -> None:
        super().__init__()
        self.num = num
        self.norm1 = RMSNorm(c.hidden_size, NORM_EPS, num)
        self.attn = VisionAttention(c, num)
        self.norm2 = RMSNorm(c.hidden_size, NORM_EPS, num)
        self.mlp = VisionMLP(c, num)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:                          # [n, C]
        x = to_bf16(x.to(self.num.arith) + self.attn(self.norm1(x), cos, sin))
        return to_bf16(x.to(self.num.arith) + self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, c: VisionConfig, num: Numerics) -> None:
        super().__init__()
        self.proj = Linear(3 * c.patch_size**2, c.hidden_size, "bf16", num, bias=True)

    def forward(self, patches: Tensor) -> Tensor:                                              # [n, 3, p, p]
        return self.proj(patches.flatten(1))                                                   # [n, C]


class VisionTower(nn.Module):
    """The ViT: patches of one image [n, 3, p, p] on a grid (n_h, n_w) -> [n, C] bfloat16, after the final norm."""

    def __init__(self, vision_config: VisionConfig, num: Numerics) -> None:
        super().__init__()
        c = vision_config
        self.num, self.theta, self.head_dim = num, c.rope_theta, c.hidden_size // c.num_attention_heads
        self.patch_embed = PatchEmbed(c, num)
        self.blocks = nn.ModuleList(VisionBlock(c, num) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, NORM_EPS, num)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        if len(patches) != grid[0] * grid[1]:
            raise ValueError(f"{len(patches)} patches do not fill a grid of {grid[0]} x {grid[1]}")
        cos, sin = rotary_2d(grid, self.head_dim, self.theta, self.num, patches.device)        # [n, hd/2]
        x = self.patch_embed(patches)                                                          # [n, C]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


class Aligner(nn.Module):
    """The tower's output [n, C] on its grid -> one row for each IMAGE token, [n_llm_h * n_llm_w, D] bfloat16, in
    reading order. A row sees downsample_ratio^2 patches; beyond the right and lower edge they are zero."""

    def __init__(self, vision_config: VisionConfig, hidden_size: int, num: Numerics) -> None:
        super().__init__()
        self.num, self.ratio = num, vision_config.downsample_ratio
        self.w1 = Linear(vision_config.hidden_size * self.ratio**2, hidden_size, "bf16", num, bias=True)
        self.w2 = Linear(hidden_size, hidden_size, "bf16", num, bias=True)

    def forward(self, vit: Tensor, grid: tuple[int, int]) -> Tensor:                           # [n, C]
        r, (n_h, n_w) = self.ratio, grid
        x = F.pad(vit.unflatten(0, (n_h, n_w)), (0, 0, 0, -n_w % r, 0, -n_h % r))              # [., ., C], whole cells
        x = x.unflatten(1, (-1, r)).unflatten(0, (-1, r))                                      # [., r, ., r, C]
        x = x.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)                                  # [n_llm, C * r * r]
        x = self.w1(x).to(self.num.arith)                                                      # [n_llm, D]
        # GELU is x * Phi(x); 1 + erf, as libraries have it, loses every digit of Phi in the lower tail, erfc none.
        return self.w2(to_bf16(0.5 * x * torch.erfc(x * -(0.5**0.5))))                         # [n_llm, D]
