"""The command line: an error of the user is one line on stderr, exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import ones

from cmoe.cli import main
from cmoe.machine import cpu_flags


def errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse ends the process itself
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


def test_env_names_versions_devices_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for name in ("cmoe", "torch", "transformers", "python", "cpu flags", "threads", "memory"):
        assert f"\n{name} " in f"\n{out}"
    assert "backends for bfloat16 E128 K8 H2048 I768 silu on cpu" in out
    assert "\n  reference  can run" in out


def test_env_says_what_triton_could_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setenv("CMOE_TRITON_PARAMETERS", str(path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    main(["env"])
    out = capsys.readouterr().out
    assert f"triton file  {path} (none yet: python -m bench tune)\n" in out
    assert "compute capability 8.0 up and on ROCm devices, not on cpu (unless TRITON_INT" in out
    for line in (
        "what triton could run on, here or elsewhere:",
        "  CUDA 8.0 up  bfloat16, float16, float32; blocks copied by threads",
        "  CUDA 9.0 up  as above, or by tma where tuned rows say so",
        "  CUDA 9.x     as above, or by tma warps where tuned rows say so",
        "  ROCm         bfloat16, float16, float32; blocks copied by threads",
        "  CPU          in Triton's interpreter, to try it out: TRITON_INTERPRET=1",
    ):
        assert f"\n{line}\n" in out
    path.touch()
    main(["env"])
    assert f"triton file  {path}\n" in capsys.readouterr().out


def test_env_needs_neither_transformers_nor_triton() -> None:
    blocked = (
        "import sys; sys.modules['transformers'] = sys.modules['triton'] = None; "
        "from cmoe.cli import main; sys.exit(main(['env']))"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_too() -> None:
    command = [sys.executable, "-m", "cmoe.cli", "demo", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("cmoe demo: /nowhere is not a folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["bake"], "invalid choice: 'bake'"),
        (["demo", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["demo", "--tokens", "0"], "must be at least 2, got 0"),
        (["demo", "--tokens", "many"], "invalid"),
        (["demo", "model", "--keep", "kept"], "leave it out with MODEL_DIR"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in errors(arguments, capsys)


def test_a_folder_of_another_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8}))
    save_file({"a": ones(1)}, tmp_path / "model.safetensors")
    line = errors(["demo", str(tmp_path)], capsys)
    assert "model_type 'llama' is not in the table of families; known: qwen3_moe, mixtral" in line


def test_a_folder_with_a_truncated_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    save_file({"a": ones(9)}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model.safetensors is truncated" in errors(["demo", str(tmp_path)], capsys)


def test_a_folder_to_keep_that_is_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert "is not empty" in errors(["demo", "--keep", str(tmp_path)], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_inspect_prints_what_a_folder_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    save_file({"a": ones(1)}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    assert "deepseek_v4: its first layers" in capsys.readouterr().out


def test_inspect_says_by_its_exit_code_that_something_is_missing(tmp_path: Path) -> None:
    sizes = {"num_experts": 1, "num_experts_per_tok": 1, "hidden_size": 4}
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "norm_topk_prob": True, **sizes}
    config["moe_intermediate_size"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"mlp.experts.0.up_proj.weight": ones(4, 4)}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 1


def test_inspect_of_a_folder_that_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no config.json" in errors(["inspect", str(tmp_path)], capsys)


def test_cpu_flags() -> None:
    assert cpu_flags("flags\t\t: fpu avx2 avx512f avx512_bf16 sse\n") == [
        "avx2",
        "avx512f",
        "avx512_bf16",
    ]
    assert cpu_flags("Features\t: fp asimd bf16\n") == ["asimd", "bf16"]
    assert cpu_flags("") == []
