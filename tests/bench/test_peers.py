from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from gguf.quants import quantize

from tools.bench.peers.compare import Case, Run, rows, table, turns
from tools.bench.peers.gguf_file import widen

CASE = Case(4, "ours", {"theirs": 2.0})


def test_turns_go_forth_and_back():
    assert turns(["a", "b"], 2) == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert turns(["a", "b", "c"], 1) == ["a", "b", "c", "c", "b", "a"]


def test_a_row_is_the_median_of_its_runs_and_ours_over_it():
    runs = [Run("ours", 100, 1.0, 2.0, 1.0)]
    runs += [Run("theirs", 100, seconds, 4.0, 3.0) for seconds in (2.0, 5.0, 4.0)]
    ours, theirs = rows(CASE, runs, weight_bytes=1000)
    assert (theirs.tokens_per_second, theirs.slowest, theirs.fastest, theirs.runs) == (25.0, 20.0, 50.0, 3)
    assert (ours.ratio, theirs.ratio, theirs.target) == (1.0, 4.0, 2.0)
    assert (theirs.tokens_per_cpu_second, theirs.cpu_ratio) == (25.0, 2.0)
    assert theirs.cpu_share == 1.0


def test_bytes_a_second_are_weights_times_steps():
    (row,) = rows(CASE, [Run("ours", 100, 1.0, 1.0, 1.0)], weight_bytes=1000)
    assert row.bytes_per_second == 1000 * 100 / 4  # four tokens a step


def test_a_failed_run_counts_in_no_figure_and_is_told():
    runs = [Run("theirs", 100, 2.0, 2.0, 1.0), Run("theirs", error="it broke")]
    (row,) = rows(CASE, runs, 1000)
    assert (row.runs, row.tokens_per_second, row.error) == (1, 50.0, "it broke")
    assert "theirs: it broke" in table([row], 1e9)


def test_what_was_not_measured_is_a_dash():
    (row,) = rows(CASE, [Run("theirs", 100, 2.0, 2.0, 1.0)], 1000)
    assert math.isnan(row.ratio)
    cells = table([row], 1e9).splitlines()[2].split(" | ")
    assert cells[7:10] == ["-", "-", ">= 2"]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", GGMLQuantizationType.F32), ("bfloat16", GGMLQuantizationType.BF16)],
)
def test_a_quantised_file_is_widened_with_its_metadata(tmp_path: Path, dtype, kind):
    matrix = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.token_type", [1, 3])
    packed = quantize(matrix, GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    widen(tmp_path / "small.gguf", tmp_path / "wide.gguf", dtype)

    wide = GGUFReader(tmp_path / "wide.gguf")
    assert wide.fields["general.architecture"].contents() == "llama"
    assert wide.fields["llama.block_count"].contents() == 3
    assert wide.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert wide.fields["tokenizer.ggml.token_type"].contents() == [1, 3]
    tensors = {tensor.name: tensor for tensor in wide.tensors}
    assert tensors["token_embd.weight"].tensor_type == kind
    assert tensors["output_norm.weight"].tensor_type == GGMLQuantizationType.F32
    expected = dequantize(packed, GGMLQuantizationType.Q8_0)
    got = dequantize(tensors["token_embd.weight"].data, kind)
    np.testing.assert_allclose(got, expected, rtol=0 if dtype == "float32" else 2**-8)
