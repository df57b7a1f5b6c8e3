"""Flags with several values, given once or again."""

from __future__ import annotations

import argparse

import pytest

from bench.flags import Values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [1, 4]),
        (["--tokens", "2", "3"], [2, 3]),
        (["--tokens", "2", "--tokens", "3", "5"], [2, 3, 5]),
    ],
)
def test_a_flag_given_again_adds_to_its_values(arguments: list[str], expected: list[int]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", nargs="+", action=Values, type=int, default=[1, 4])
    assert parser.parse_args(arguments).tokens == expected


def test_choices_are_still_judged(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", nargs="+", action=Values, choices=("eager", "compile"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--mode", "eager", "--mode", "fast"])
    assert "invalid choice: 'fast'" in capsys.readouterr().err
