"""Matrix descriptors of warpgroup products: what PTX asks for, and what the assembler made of that.

Both are followed along the text for the first thread of a program, as far as registers are known without running it;
loops in their first round.
"""

from __future__ import annotations

import re

SHARED = 0x400
"""Where a program's shared memory begins on Hopper."""
WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
Known = dict[str, int | None]
_SASS = re.compile(r"\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s+([^;]*?)\s*;")
_PTX = re.compile(r"^\s*(@!?%p\d+)?\s*([a-z][\w.:]*)\s+(.*);", re.M)


def asked_for(ptx: str) -> set[int]:
    """Descriptors of all ``wgmma`` whose values are known."""
    known: Known = {"%tid.x": 0}
    found = set()
    for guard, operation, rest in _PTX.findall(ptx):
        operands = [each.strip() for each in re.split(r",(?![^{]*\})", rest)]
        if operation.startswith("wgmma.mma_async"):
            found |= {value for each in operands[1:3] if (value := known.get(each)) is not None}
        elif operands[0].startswith("%r"):
            given = [_ptx_operand(each, known) for each in operands[1:]]
            known[operands[0]] = None if guard else _ptx_result(operation, given)
    return found


def _ptx_operand(text: str, known: Known) -> int | None:
    if text.startswith("global_smem"):
        return SHARED
    return int(text, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text) else known.get(text)


def _ptx_result(operation: str, given: list[int | None]) -> int | None:
    name, *kinds = operation.split(".")
    widths = [int(kind[1:]) for kind in kinds if re.fullmatch(r"[busf]\d+", kind)]
    values = [each for each in given if each is not None]
    if len(values) < len(given) or not values or not widths or (kinds[-1][0] == "s" and name in ("shr", "bfe")):
        return None
    mask = (1 << min(widths)) - 1
    a, b, c = [*values, 0, 0][:3]
    shift = min(b & WORD, 64)
    results = {"mov": a, "cvt": a, "shfl": a, "add": a + b, "sub": a - b, "and": a & b, "or": a | b, "xor": a ^ b}
    results |= {"shl": a << shift, "shr": (a & mask) >> shift, "bfe": (a & mask) >> shift & ((1 << (c & 63)) - 1)}
    return results[name] & mask if name in results else None


def assembled(sass: str) -> tuple[list[tuple[int, str]], int]:
    """Known descriptors of all ``HGMMA`` with their lines, and how many are not known."""
    known: Known = {"URZ": 0, "RZ": 0, "UPT": 1, "PT": 1}
    found, hidden = [], 0
    for guard, operation, rest in _SASS.findall(sass):
        operands = [each.strip().partition(".")[0] for each in rest.split(",")]
        if operation.startswith("HGMMA"):
            first = int(re.findall(r"gdesc\[UR(\d+)\]", rest)[0])
            for at in (first + 2,) if operands[1].startswith("R") else (first, first + 2):
                low, high = known.get(f"UR{at}"), known.get(f"UR{at + 1}")
                if low is None or high is None:
                    hidden += 1
                else:
                    found.append((high << 32 | low, f"{operation} {rest}"))
        if operation == "SHFL.IDX":  # of the first lane, where all are to know what one does
            operation, operands = "MOV", operands[1:3]
        if re.fullmatch(r"U?R(Z|\d+)", operands[0]):
            _follow(operation, operands, known, guarded=bool(guard))
    return found, hidden


def _follow(operation: str, operands: list[str], known: Known, *, guarded: bool) -> None:
    """Keep what an instruction writes, or that it is not known any more."""
    name, *kinds = operation.split(".")
    name, target, given = re.sub(r"^U(?=[A-Z])", "", name), operands[0], operands[1:]
    pair = "64" in kinds and name in ("IADD3", "MOV")
    wide = bool({"64", "WIDE"} & set(kinds))
    carries = [each for each in given if re.fullmatch(r"U?P\d", each)] if name == "IADD3" and "X" not in kinds else []
    values = [_sass_operand(each, known, pair=pair) for each in given if each not in carries]
    numbers = [each for each in values if each is not None]
    result = _sass_result(name, kinds, numbers) if len(numbers) == len(values) and not guarded else None
    if name == "S2UR" or operation == "S2R":
        result = 0 if given[0] in ("SR_CgaCtaId", "SR_TID.X") else None
    for carry in carries:
        known[carry] = None if result is None else result >> 32 & 1
    kind, number = target.rstrip("Z0123456789"), target.lstrip("UR")
    if number == "Z":
        return
    if result is None:  # loads and products write several
        for at in range(int(number), int(number) + (128 if name == "HGMMA" else 4 if kind == "R" else 1 + wide)):
            known[f"{kind}{at}"] = None
        return
    known[target] = None if result is None else result & WORD
    if pair and result is not None:
        known[f"{kind}{int(number) + 1}"] = result >> 32 & WORD


def _sass_operand(text: str, known: Known, *, pair: bool) -> int | None:
    sign, bare = re.fullmatch(r"([-~!]?)(.*)", text).groups()  # type: ignore[union-attr]
    register = re.fullmatch(r"(U?R)(\d+)", bare)
    try:
        value = int(bare, 0)
    except ValueError:
        value = known.get(bare)  # type: ignore[assignment]
        if pair and register and value is not None:
            high = known.get(f"{register[1]}{int(register[2]) + 1}")
            value = None if high is None else high << 32 | value  # type: ignore[assignment]
    if value is None:
        return None
    signed = {"": value, "-": -value, "~": ~value, "!": 1 - value}[sign]
    return signed & (LONG if pair else WORD)


def _sass_result(name: str, kinds: list[str], given: list[int]) -> int | None:
    """Of what addresses are made of; a sum's carries stay in it."""
    if name in ("MOV", "R2UR"):
        return given[0]
    if name in ("IADD3", "VIADD"):
        return sum(given)
    if name == "IMAD" and not {"WIDE", "HI", "X"} & set(kinds):
        return given[0] * given[1] + given[2]
    if name == "LEA" and not kinds and len(given) == 3:
        return (given[0] << given[2]) + given[1] & WORD
    if name == "LEA" and kinds == ["HI"] and len(given) == 4:
        return ((given[2] << 32 | given[0]) << given[3] >> 32) + given[1] & WORD
    if name == "SGXT" and "U32" in kinds:
        return given[0] & ((1 << given[1]) - 1)
    if name == "SHF" and kinds == ["R", "U32", "HI"]:
        return given[2] >> given[1]
    if name == "SHF" and kinds == ["L", "U32"]:
        return given[0] << given[1] & WORD
    if name == "LOP3" and len(given) >= 4:
        a, b, c, table = given[:4]
        terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1]
        return sum(terms) & WORD  # no two of them share a bit
    return None
