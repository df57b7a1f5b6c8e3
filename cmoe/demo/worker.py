"""The child process that holds one model: reads requests as lines of JSON, answers each.

A process of its own for each model, so that peak memory, compiled graphs, compile times are the
model's own. `client.py` is the other side.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.utils import counters
from transformers.utils import logging

from cmoe.custom_ops.backends import LayerSpec, choose_backend
from cmoe.demo.greedy import Greedy
from cmoe.demo.memory import peak_bytes, reset_peak
from cmoe.demo.models import load_cmoe, load_transformers
from cmoe.demo.peer import Mode, Peer
from cmoe.runner import MoERunner

Answer = dict[str, Any]


class Arm:
    """One model under measurement. Each public method answers one kind of request."""

    def load(self, request: Answer) -> Answer:
        """folder, is_cmoe, dtype, device, seed, num_prompt_tokens, num_steps -> backend, legend,
        predicts_tokens.

        The cache is ready then. legend: what one call of the model is.
        """
        self._device = torch.device(request["device"])
        dtype = getattr(torch, request["dtype"])
        is_cmoe, folder = request["is_cmoe"], Path(request["folder"])
        self._model = (load_cmoe if is_cmoe else load_transformers)(folder, dtype, self._device)
        size = (1, request["num_prompt_tokens"])
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(request["seed"])
        prompt = torch.randint(vocabulary, size, generator=generator).to(self._device)
        self._greedy = Greedy(self._model, prompt, request["num_steps"])
        self._modes: tuple[Mode, Mode] | None = None
        self._peer = None if is_cmoe else Peer(self._model, self._greedy)
        if self._peer is not None:
            self._peer.use(Mode(implementation="eager", compiled=False))
        self._peak_bytes = peak_bytes(self._device)
        return {
            "backend": _backend(self._model) if is_cmoe else "",
            "legend": self._greedy.legend(),
            "predicts_tokens": self._greedy.predicts_tokens,
        }

    def compile(self, request: Answer) -> Answer:
        """-> seconds of the first prefill plus the first decode, graphs, cache hits and misses, the
        legend of what was compiled.
        """
        counters.clear()
        first = self._greedy.compile()
        return {
            "legend": self._greedy.legend(),
            "seconds": (first.prefill_ms + first.decode_ms[0]) / 1e3,
            "num_graphs": counters["stats"]["unique_graphs"],
            "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
            "cache_misses": counters["inductor"]["fxgraph_cache_miss"],
        }

    def choose(self, request: Answer) -> Answer:
        """-> the names of transformers' fastest modes, what each trial gave."""
        assert self._peer is not None
        self._modes = self._peer.choose()
        names = [str(mode) for mode in self._modes]
        answer: Answer = {"prefill": names[0], "decode": names[1], "trials": self._peer.trials}
        made = [self._peer.compilations[m] for m in dict.fromkeys(self._modes) if m.compiled]
        answer["compile_seconds"] = sum(seconds for seconds, _ in made)
        answer["num_graphs"] = sum(graphs for _, graphs in made)
        return answer

    def generate(self, request: Answer) -> Answer:
        """forced, path -> tokens; the logits are saved at the path."""
        if self._modes is not None and self._peer is not None:
            self._peer.use(self._modes[1])
        generated = self._greedy.run(forced=request["forced"])
        save_file({"logits": generated.logits}, request["path"])
        return {"tokens": generated.tokens}

    def time_prefill(self, request: Answer) -> Answer:
        """-> ms of one prefill."""
        if self._modes is not None and self._peer is not None:
            self._peer.use(self._modes[0])
        return {"ms": [self._greedy.run(1).prefill_ms]}

    def time_decode(self, request: Answer) -> Answer:
        """-> ms of every decode step of one run."""
        if self._modes is not None and self._peer is not None:
            self._peer.use(self._modes[1])
        return {"ms": self._greedy.run().decode_ms}

    def reset_peak(self, request: Answer) -> Answer:
        """Leaves out of the peak what was tried or compiled since the load."""
        reset_peak(self._device)
        return {}

    def peak(self, request: Answer) -> Answer:
        """-> bytes, the highest of the load and of what ran since reset_peak; graphs by now."""
        known = [b for b in (self._peak_bytes, peak_bytes(self._device)) if b is not None]
        num_graphs = counters["stats"]["unique_graphs"]
        return {"bytes": max(known, default=None), "num_graphs": num_graphs}


def _backend(model: nn.Module) -> str:
    """The backend that the model's layers run on."""
    runners = (module for module in model.modules() if isinstance(module, MoERunner))
    if (runner := next(runners, None)) is None:
        return "by the experts switch"
    moe, weight = runner.config, runner.routed_experts.w13_weight
    spec = LayerSpec(
        device=weight.device,
        dtype=weight.dtype,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        hidden_size=moe.padded_hidden_size(),
        intermediate_size=moe.padded_intermediate_size(),
        activation=moe.activation.name,
    )
    return choose_backend(spec, moe.backend).name


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers until there are no more requests."""
    arm = Arm()
    methods: Mapping[str, Callable[[Answer], Answer]] = {
        method.__name__: method
        for method in (
            arm.load,
            arm.compile,
            arm.choose,
            arm.generate,
            arm.time_prefill,
            arm.time_decode,
            arm.reset_peak,
            arm.peak,
        )
    }
    for line in requests:
        request = json.loads(line)
        try:
            answer = methods[request["method"]](request)
        except Exception as error:  # The parent says it, then ends this process.
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Keeps stdout for answers: what libraries print there goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
