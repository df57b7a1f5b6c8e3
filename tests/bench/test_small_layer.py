"""What a layer costs beyond its kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench import small_layer
from bench.shapes import shape_from_text
from bench.stacks import LAYERS, Stack, layer_tensors, plain_layer, plain_stack, stack
from bench.verify import relative_error

SHAPE = shape_from_text("E8K2H64I32")


def _subject(impl: str, make: Callable[[], Callable[[Tensor], Tensor]]) -> small_layer.Subject:
    return small_layer.Subject(
        impl=impl,
        part="stack of 4",
        layers=4,
        make=make,
        expected=lambda x, compute: -x.to(compute),
        mode="eager",
    )


def test_time_is_given_by_the_layer() -> None:
    chosen = [_subject("test:one", lambda: torch.neg)]
    (cell,) = small_layer.measure(SHAPE, turns=3, chosen=chosen)
    assert cell.ms_median is not None
    assert cell.extra["us_per_layer"] == pytest.approx(cell.ms_median * 1e3 / 4)
    assert cell.runs == 3 * small_layer.CALLS_PER_TURN
    assert "test:one" in small_layer.text([cell])


def test_what_cannot_be_made_has_a_reason() -> None:
    def make() -> Callable[[Tensor], Tensor]:
        raise ImportError("test is not installed")

    (cell,) = small_layer.measure(SHAPE, turns=1, chosen=[_subject("test:absent", make)])
    assert cell.error == "ImportError: test is not installed"
    assert "ImportError: test is not installed" in small_layer.text([cell])


def test_a_wrong_result_is_not_timed() -> None:
    (cell,) = small_layer.measure(
        SHAPE, turns=1, chosen=[_subject("test:wrong", lambda: torch.abs)]
    )
    assert cell.ms_median is None
    assert str(cell.error).startswith("wrong result: relative error")


@pytest.mark.parametrize("impl", sorted(LAYERS))
def test_a_stack_of_each_maker_is_the_plain_one(impl: str) -> None:
    with torch.no_grad():
        x = torch.randn(3, 64)
        y = stack(impl, SHAPE, "fp32", 2)(x)
        # float32 against float64 on the same weights: a few roundings of 1e-7.
        assert relative_error(y, plain_stack(SHAPE, "fp32", 2, x, torch.float64)) < 1e-5


def test_the_bare_kernels_compute_the_last_layer() -> None:
    with torch.no_grad():
        x = torch.randn(1, 64)
        tensors = layer_tensors(SHAPE, "fp32", small_layer.NUM_LAYERS - 1)
        y = small_layer.bare_kernels(SHAPE, "fp32")(x)
        assert relative_error(y, plain_layer(SHAPE, tensors, x, torch.float64)) < 1e-5


def test_an_unknown_maker_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown layer 'x'; choose one of cmoe, transformers"):
        stack("x", SHAPE, "bf16", 1)


class Breaking(nn.Module):
    """A layer that no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_a_stack_that_breaks_the_graph_leaves_the_others_whole(
    count_compiles: Callable[[], int],
) -> None:
    x = torch.randn(1, 64)
    torch.compile(Stack([Breaking(), Breaking()]), backend="eager")(x)
    before = count_compiles()
    torch.compile(Stack([nn.Identity(), nn.Identity()]), backend="eager")(x)
    assert count_compiles() - before == 1
