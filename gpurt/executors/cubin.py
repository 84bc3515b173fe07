"""Cubin: what a compiled kernel's ELF file says of itself: bytes of code, initialised variables.

No GPU and no driver are needed. Called functions lie inside their kernel's section and have symbols
of their own, `$KERNEL$FUNCTION`, cut after some hundred characters.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = "<16xHHIQQQIHHHHHH"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE, _NO_BITS = 2, 8
_OBJECT, _FUNCTION = 1, 2


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    section: int
    offset: int
    size_bytes: int


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Bytes of every function, callees by their own (mangled) names; an entry's own include those
    of all that it calls.
    """
    found: dict[str, int] = {}
    for symbol in _symbols(cubin):
        if symbol.kind == _FUNCTION:
            name = symbol.name.rsplit("$", 1)[-1]
            found[name] = found.get(name, 0) + symbol.size_bytes
    return found


def variable(cubin: bytes, name: str) -> bytes:
    """The first content of a device variable. Raises: KeyError if there is none."""
    sections = _sections(cubin)
    for symbol in _symbols(cubin):
        if symbol.kind == _OBJECT and symbol.name == name:
            section = sections[symbol.section]
            if section[1] == _NO_BITS:
                return bytes(symbol.size_bytes)
            begin = section[4] + symbol.offset
            return cubin[begin : begin + symbol.size_bytes]
    raise KeyError(name)


def _sections(cubin: bytes) -> list[tuple[int, ...]]:
    header = struct.unpack_from(_HEADER, cubin)
    offset, size, count = header[5], header[10], header[11]
    return [_SECTION.unpack_from(cubin, offset + i * size) for i in range(count)]


def _symbols(cubin: bytes) -> Iterator[_Symbol]:
    sections = _sections(cubin)
    for section in sections:
        if section[1] != _SYMBOL_TABLE:
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], _SYMBOL.size):
            name, info, _, index, value, size = _SYMBOL.unpack_from(cubin, at)
            end = cubin.index(b"\0", names + name)
            text = cubin[names + name : end].decode(errors="replace")
            yield _Symbol(text, info & 15, index, value, size)
