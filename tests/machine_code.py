"""What NVIDIA machine code reads without having written it, or that it is a trap: how compilers' faults show that tests may miss.

ptxas 12.8 once computed the address of a matrix operand in one branch of a loop and used it in the other as well, where it was
that of an earlier step. Uniform registers, which hold such addresses, are few enough to follow through all ways of a kernel.
"""

from __future__ import annotations

import re

UNIFORM = re.compile(r"(?:\b(gdesc|desc)\[)?\bUR(\d+)")
WRITERS = ("S2UR", "R2UR", "CS2UR", "LDCU", "REDUX", "VOTEU")
# What they copy they do not use: compilers also save and hand on registers that hold nothing yet.
COPY, SAVE = "UMOV", "MOV.SPILL"
BRANCHES, ENDS = ("BRA", "BRX", "JMP"), ("EXIT", "RET")


def instructions(text: str) -> list[tuple[int, str, str, str]]:
    """Return address, predicate, operation and operands of each instruction of ``cuobjdump -sass``."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+ )?\s*([A-Za-z0-9_.]+)\s*([^;]*);", text)
    return [(int(address, 16), *rest) for address, *rest in found]


def written(operation: str, operands: str) -> set[int]:
    """Return the uniform registers that an instruction writes."""
    first = re.match(r"(?:UP\d, )?UR(\d+)", operands)
    if not first or "SETP" in operation or not (operation.startswith("U") or operation.split(".")[0] in WRITERS):
        return set()
    width = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
    return set(range(int(first[1]), int(first[1]) + width))


def read(operation: str, operands: str) -> set[int]:
    """Return the uniform registers that an instruction reads, of a wide operand those known to be read."""
    sources = re.sub(r"^(UP\d, )?UR\d+", "", operands) if written(operation, operands) else operands
    registers: set[int] = set()
    for match in UNIFORM.finditer(sources):
        start, width = int(match[2]), 1
        if match[1] == "gdesc" and operation.startswith("HGMMA"):
            # Addresses of both factors; if the first one comes in registers, that of the second alone is read.
            in_registers = len(re.findall(r"\bR\d+", sources[: match.start()])) > 1
            start, width = (start + 2, 2) if in_registers else (start, 4)
        elif match[1] or (operation.startswith("U") and ".64" in operation):
            width = 2
        registers |= set(range(start, start + width))
    return registers


def known_after(before: frozenset[int], operation: str, operands: str) -> frozenset[int]:
    """Return which uniform registers hold something once an instruction has run, where ``before`` did."""
    is_nothing = operation == COPY and read(operation, operands) - before
    return before - written(operation, operands) if is_nothing else before | written(operation, operands)


def unwritten_reads(text: str) -> list[str]:
    """Return instructions that read a uniform register which some way from the kernel's start to them has not written."""
    code = instructions(text)
    place = {address: index for index, (address, *_) in enumerate(code)}
    following: list[list[int]] = []
    for index, (_, predicate, operation, operands) in enumerate(code):
        name = operation.split(".")[0]
        target = re.search(r"0x([0-9a-f]+)", operands) if name in BRANCHES else None
        goes_on = name not in BRANCHES + ENDS or predicate or re.search(r"\bU?P\d", operands)
        following.append([place[int(target[1], 16)]] if target else [])
        if goes_on and index + 1 < len(code):
            following[-1].append(index + 1)
    # Of each instruction that is reached, what all ways to it have written; all instructions start with too much.
    before: dict[int, frozenset[int]] = {0: frozenset()}
    waiting = [0]
    while waiting:
        index = waiting.pop()
        after = known_after(before[index], *code[index][2:])
        for successor in following[index]:
            known = before.get(successor)
            if known is None or not known <= after:
                before[successor] = after if known is None else known & after
                waiting.append(successor)
    return [
        f"{operation} {operands.strip()}"
        for index, (_, _, operation, operands) in enumerate(code)
        if index in before and operation not in (COPY, SAVE) and read(operation, operands) - before[index]
    ]


def is_trap(text: str) -> bool:
    """Return whether machine code traps before it branches or stores, as what Triton makes of too little tensor memory does."""
    for _, predicate, operation, _ in instructions(text):
        name = operation.split(".")[0]
        if name in ("STG", "RED", "ATOMG", *BRANCHES, *ENDS):
            return False
        if name == "BPT" and not predicate:
            return True
    return False
