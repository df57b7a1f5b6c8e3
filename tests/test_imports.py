"""What `import cmoe` does in a fresh process: nothing that a user would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

OPTIONAL = ("triton", "transformers", "safetensors", "tabulate", "numpy", "tokenizers")

# Runs ahead of each snippet: the packages that torch does without cannot be found, and from
# `watch()` on no process is started, no connection opened.
GUARD = f"""
import sys
import warnings

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

def watch():
    def refuse(event, arguments):
        if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system",
                     "socket.connect"):
            raise RuntimeError(f"refused: {{event}}")
    sys.addaudithook(refuse)

sys.meta_path.insert(0, Blocker())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch misses numpy aloud
    import torch
watch()
"""


def run(snippet: str) -> subprocess.CompletedProcess[str]:
    """The snippet in a fresh process, under the guard, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", GUARD + snippet]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_import_needs_torch_alone_says_nothing_starts_nothing() -> None:
    done = run("import cmoe")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_layer_runs_on_torch_alone() -> None:
    done = run(
        """
import cmoe
config = cmoe.MoEConfig(num_experts=3, top_k=2, hidden_size=8, intermediate_size=4)
layer = cmoe.FusedMoE(config, prefix="mlp")
layer.load_weights(
    (f"experts.{expert}.{name}.weight", torch.ones(size))
    for expert in range(3)
    for name, size in {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}.items()
)
print(layer(torch.zeros(5, 8), torch.zeros(5, 3)).shape)
"""
    )
    assert done.stdout == "torch.Size([5, 8])\n", done.stderr


def test_import_leaves_the_compiler_alone() -> None:
    """Loading torch's compiler takes about a second, which eager users should not pay."""
    done = run("import cmoe; print({'torch._dynamo', 'torch._inductor'} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


def test_the_guard_blocks_packages() -> None:
    done = run(
        f"""
import importlib
for package in {OPTIONAL!r}:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        print(error)
"""
    )
    assert done.stdout.splitlines() == [f"blocked: {package}" for package in OPTIONAL]


def test_the_guard_refuses_processes() -> None:
    assert "refused: subprocess.Popen" in run("import subprocess; subprocess.run(['true'])").stderr
    assert "refused: os.fork" in run("import os; os.fork()").stderr


def test_the_guard_shows_warnings() -> None:
    assert "UserWarning" in run("import warnings; warnings.warn('noticed')").stderr
