"""The memory that a load takes: that of the weights, hardly more, whatever the layout."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from cmoe.environment import cxx_compiler

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 32, 1024, 1024
LAYERS = 2
MAX_RATIO = 1.05

# Two layers on the meta device get memory that nobody has touched; a small load ahead of it brings
# in what torch needs for any load.
CHILD = """
import sys
from pathlib import Path
import torch
import cmoe
from cmoe.checkpoint import load_model, open_checkpoint
from cmoe.demo.memory import peak_bytes, reset_peak

cpu = torch.device("cpu")
small, large = (open_checkpoint(Path(folder)) for folder in sys.argv[1:3])
transposed, interleaved, dtype = eval(sys.argv[3])

def model_of(num_experts, hidden, intermediate):
    config = cmoe.MoEConfig(
        num_experts=num_experts, top_k=2, hidden_size=hidden, intermediate_size=intermediate,
        layout=cmoe.CheckpointLayout(transposed=transposed, interleaved=interleaved),
        params_dtype=dtype,
    )
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(hidden, hidden, dtype=dtype)})
        for layer in range(2):
            prefix = f"{num_experts}-layer-{layer}"
            model[str(layer)] = torch.nn.ModuleDict({"mlp": cmoe.FusedMoE(config, prefix)})
    return model.to_empty(device="cpu")

load_model(model_of(2, 8, 4), small)
model = model_of(*SIZES)
reset_peak(cpu)
before = peak_bytes(cpu)
load_model(model, large)
print(sum(p.nbytes for p in model.parameters()), peak_bytes(cpu) - before)
"""


def shapes_of(
    layout: str, num_experts: int, hidden: int, intermediate: int
) -> dict[str, list[int]]:
    """Names and shapes of a checkpoint."""
    shapes = {"embed.weight": [hidden, hidden]}
    for layer in range(LAYERS):
        prefix = f"{layer}.mlp.experts"
        if layout == "per expert":
            for expert in range(num_experts):
                for name in ("gate_proj", "up_proj"):
                    shapes[f"{prefix}.{expert}.{name}.weight"] = [intermediate, hidden]
                shapes[f"{prefix}.{expert}.down_proj.weight"] = [hidden, intermediate]
        elif layout == "fused":
            shapes[f"{prefix}.gate_up_proj"] = [num_experts, 2 * intermediate, hidden]
            shapes[f"{prefix}.down_proj"] = [num_experts, hidden, intermediate]
        else:
            shapes[f"{prefix}.gate_up_proj"] = [num_experts, hidden, 2 * intermediate]
            shapes[f"{prefix}.down_proj"] = [num_experts, intermediate, hidden]
    return shapes


def write_zeros(folder: Path, shapes: dict[str, list[int]], dtype: str) -> Path:
    """A checkpoint of zeros that takes no room on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the safetensors library writes it
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc/self/clear_refs")
@pytest.mark.parametrize(
    ("layout", "dtype", "arguments"),
    [
        ("per expert", "F32", "(False, False, torch.float32)"),
        ("transposed", "F32", "(True, True, torch.float32)"),
        ("fused", "BF16", "(False, False, torch.float32)"),
    ],
)
def test_the_peak(layout: str, dtype: str, arguments: str, tmp_path: Path) -> None:
    small = write_zeros(tmp_path / "small", shapes_of(layout, 2, 8, 4), dtype)
    sizes = (NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    large = write_zeros(tmp_path / "large", shapes_of(layout, *sizes), dtype)
    child = CHILD.replace("SIZES", repr(sizes))
    command = [sys.executable, "-c", child, str(small), str(large), arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights, taken = map(int, done.stdout.split())
    assert 0.99 * weights < taken <= MAX_RATIO * weights, taken / weights


# What packing adds at its highest, then a load into the packed layers.
PACKED = """
import sys
from pathlib import Path
import torch
import cmoe
from cmoe.checkpoint import load_model, open_checkpoint
from cmoe.demo.memory import peak_bytes, reset_peak

cpu = torch.device("cpu")
small, large = (open_checkpoint(Path(folder)) for folder in sys.argv[1:3])

def model_of(num_experts, hidden, intermediate):
    config = cmoe.MoEConfig(
        num_experts=num_experts, top_k=2, hidden_size=hidden, intermediate_size=intermediate,
        layout=cmoe.CheckpointLayout(transposed=True, interleaved=True),
        params_dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(hidden, hidden)})
        for layer in range(2):
            prefix = f"{num_experts}-layer-{layer}"
            model[str(layer)] = torch.nn.ModuleDict({"mlp": cmoe.FusedMoE(config, prefix)})
    return model.to_empty(device="cpu")

def taken(call):
    reset_peak(cpu)
    before = peak_bytes(cpu)
    call()
    return peak_bytes(cpu) - before

tiny = model_of(2, 64, 32)
cmoe.pack_weights(tiny)
load_model(tiny, small)
model = model_of(*SIZES)
load_model(model, large)
largest = max(p.nbytes for p in model.parameters())
print(largest, taken(lambda: cmoe.pack_weights(model)), taken(lambda: load_model(model, large)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc/self/clear_refs")
@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")
def test_the_peak_of_packing(tmp_path: Path) -> None:
    small = write_zeros(tmp_path / "small", shapes_of("transposed", 2, 64, 32), "BF16")
    sizes = (NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    large = write_zeros(tmp_path / "large", shapes_of("transposed", *sizes), "BF16")
    child = PACKED.replace("SIZES", repr(sizes))
    command = [sys.executable, "-c", child, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    largest, packing, loading = map(int, done.stdout.split())
    assert 0.9 * largest < packing <= MAX_RATIO * largest, packing / largest
    assert loading <= 0.2 * largest, loading / largest


PRETRAINED = """
import sys
import torch
from cmoe.demo.memory import peak_bytes, reset_peak
from cmoe.integrations.transformers import from_pretrained

cpu = torch.device("cpu")
from_pretrained(sys.argv[1])
reset_peak(cpu)
before = peak_bytes(cpu)
model = from_pretrained(sys.argv[2])
print(sum(p.nbytes for p in model.parameters()), peak_bytes(cpu) - before)
"""


def whole_model(num_experts: int, hidden: int, intermediate: int) -> dict[str, list[int]]:
    """Names and shapes of a Qwen3-MoE."""
    shapes = {"model.embed_tokens.weight": [64, hidden], "lm_head.weight": [64, hidden]}
    shapes["model.norm.weight"] = [hidden]
    experts = shapes_of("per expert", num_experts, hidden, intermediate)
    shapes |= {f"model.layers.{name}": shape for name, shape in experts.items() if "mlp" in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.mlp.gate.weight"] = [num_experts, hidden]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = [hidden]
        for name in ("q", "k", "v", "o"):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = [hidden, hidden]
        for name in ("q", "k"):
            shapes[f"{prefix}.self_attn.{name}_norm.weight"] = [hidden]
    return shapes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc/self/clear_refs")
def test_the_peak_of_from_pretrained(tmp_path: Path) -> None:
    folders = []
    for name, sizes in {"small": (2, 8, 4), "large": (NUM_EXPERTS, HIDDEN, INTERMEDIATE)}.items():
        folder = write_zeros(tmp_path / name, whole_model(*sizes), "F32")
        num_experts, hidden, intermediate = sizes
        config = {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "hidden_size": hidden,
            "moe_intermediate_size": intermediate,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": hidden,
            "vocab_size": 64,
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "dtype": "float32",
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(config))
        folders.append(str(folder))
    command = [sys.executable, "-c", PRETRAINED, *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights, taken = map(int, done.stdout.split())
    assert 0.99 * weights < taken <= MAX_RATIO * weights, taken / weights
