"""What a checkpoint would have called the tensor of a place that got none.

Told from the names that filled the places beside it, so in the checkpoint's own manner.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from cmoe.loading.expert_names import parse_expert_name, sibling_name

_NUMBER = re.compile(r"(?<![^.\[])(\d+)(?![^.\]])")
_EXPERT_SLOT = re.compile(
    r"(?P<block>|.*\.)(?:w13|(?P<down>w2))_(?:weight|(?P<bias>bias))"
    r"\[(?P<row>\d+)\](?:\.(?P<part>w[13]))?"
)

Signature = tuple[int, tuple[str, ...]]


class ExpectedNames:
    """The names that slots without a tensor would have been filled by."""

    def __init__(self, filled_by: Mapping[str, str], unwritten: Sequence[str]) -> None:
        """filled_by: keys by the slots that they filled."""
        self._has_gates = any(slot.endswith(".w3") for slot in (*filled_by, *unwritten))
        self._alike: dict[Signature, tuple[int, str]] = {}  # which number of the key, the key
        self._experts: dict[str, str] = {}  # a key of the experts of each block
        for slot, key in filled_by.items():
            for signature, number in _signatures(slot):
                if (place := _place(number, signature, slot, key)) is not None:
                    self._alike.setdefault(signature, (place, key))
            found = _EXPERT_SLOT.fullmatch(slot)
            if found is not None and parse_expert_name(key) is not None:
                self._experts.setdefault(found["block"], key)

    def of(self, slot: str) -> str:
        """The name; of a place that nothing is like, that of a module of transformers."""
        for signature, number in _signatures(slot):
            if signature in self._alike:
                return _renumbered(*self._alike[signature], number)
        if (found := _EXPERT_SLOT.fullmatch(slot)) is not None:
            return self._of_expert(found)
        blocks = [block for block in self._experts if slot.startswith(block)]
        if not blocks:
            return slot
        block = max(blocks, key=len)
        key = self._experts[block]
        return key[: key.rindex("experts.")].removesuffix("routed_") + slot.removeprefix(block)

    def _of_expert(self, slot: re.Match[str]) -> str:
        """As another part of the experts in its block is called."""
        block, is_bias = slot["block"], slot["bias"] is not None
        key = self._experts.get(block, f"{block}experts.0.up_proj.weight")
        parsed = parse_expert_name(key)
        assert parsed is not None, key
        part = "w2" if slot["down"] else slot["part"]
        if part != "w2" and not self._has_gates:
            part = "w3"  # What experts without a gate have is called up.
        elif part != "w2" and parsed.expert is None and parsed.part in ("w13", "w2"):
            part = "w13"
        return sibling_name(key, expert=int(slot["row"]), part=part, is_bias=is_bias)


def _place(number: str, signature: Signature, slot: str, key: str) -> int | None:
    """Which number of the key is the one that the signature leaves open; None where none is."""
    of_slot, of_key = _NUMBER.findall(slot), _NUMBER.findall(key)
    if len(of_slot) == len(of_key):
        place = signature[0] // 2
        return place if of_key[place] == number else None
    return of_key.index(number) if of_key.count(number) == 1 else None


def _renumbered(place: int, key: str, number: str) -> str:
    pieces = _NUMBER.split(key)
    pieces[2 * place + 1] = number
    return "".join(pieces)


def _signatures(slot: str) -> Iterator[tuple[Signature, str]]:
    """The slot with one of its numbers left open, with that number; the last number first."""
    pieces = _NUMBER.split(slot)
    for at in range(len(pieces) - 2, 0, -2):
        yield (at, (*pieces[:at], "#", *pieces[at + 1 :])), pieces[at]
