"""Cubin: a compiled kernel with the resources it takes, read from its ELF sections and from the compiler's log.

The two sources overlap in registers, stack and shared memory. A disagreement means that one parser no longer
understands its input, so it is an error and not a figure that happens to be wrong.
"""
from __future__ import annotations

import dataclasses
import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashgen.errors import CompileError
from flashgen.files import BadFile, Count

_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"^.*\(C7[56]\d\d\).*$", re.MULTILINE)  # serialised wgmma, ignored setmaxnreg, registers

# The structures of an ELF file: of the header, of a program header, of a section header.
_ELF_HEADER, _ELF_SEGMENT, _ELF_SECTION = map(struct.Struct, ("<16sHHIQQQIHHHHHH", "<IIQQQQQQ", "<IIQQQQIIQQ"))
_NOBITS = 8  # the type of a section that takes no room in the file

# Attributes of the .nv.info section: payload is (symbol index, value), two 32-bit words.
_EIATTR_REGCOUNT = 0x2F
_EIATTR_FRAME_SIZE = 0x11
_SIZED_FORMAT = 4         # attribute format whose 16-bit value is the length of a payload that follows
_SMEM_RESERVED_BYTES = 1024  # from sm_90 on the section counts the driver's own shared memory too


@dataclass(frozen=True)
class Resources:
    """What one kernel takes. Register and byte counts are per thread, except code and shared memory."""

    registers: Count
    stack_bytes: Count
    spill_store_bytes: Count
    spill_load_bytes: Count
    code_bytes: Count
    static_smem_bytes: Count
    warnings: tuple[str, ...] = ()  # C75xx and C76xx lines of the log

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "warnings": list(self.warnings)}  # as JSON gives it back

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Resources:
        return cls(**{**raw, "warnings": tuple(raw["warnings"])})


@dataclass(frozen=True)
class Cubin:
    image: bytes
    options: tuple[str, ...]
    nvrtc: str  # "13.0"
    log: str
    resources: Resources


def as_text(text: str) -> Cubin:
    """The image of a kernel that is compiled where it is launched: its text. Nobody knows what it will take."""
    return Cubin(text.encode(), (), "none", "", Resources(0, 0, 0, 0, 0, 0))


def check_image(image: bytes) -> None:
    """BadFile unless this is a 64-bit ELF file whose tables and sections lie inside it.

    The driver takes an address without a length and reads what the headers say, so a short image would make it read
    past the end.
    """
    if len(image) < _ELF_HEADER.size or image[:5] != b"\x7fELF\x02":
        raise BadFile("is no 64-bit ELF file", allowed="a cubin")
    header = _ELF_HEADER.unpack_from(image)
    for (start, size, count), kind in ((header[5], *header[9:11]), _ELF_SEGMENT), ((header[6], *header[11:13]),
                                                                                  _ELF_SECTION):
        if count and (size != kind.size or start + size * count > len(image)):
            raise BadFile("has an ELF table that does not lie inside it", allowed="a whole cubin")
        for row in kind.iter_unpack(image[start:start + size * count]):
            offset, length = (row[4], row[5]) if kind is _ELF_SECTION else (row[2], row[5])
            if not (kind is _ELF_SECTION and row[1] == _NOBITS) and offset + length > len(image):
                raise BadFile("has an ELF section that does not lie inside it", allowed="a whole cubin")


def read_resources(image: bytes, log: str, entry: str) -> Resources:
    """Resources of the kernel `entry`. CompileError if it is not in the image, or if image and log disagree."""
    registers, stack, code, smem_section = _from_elf(image, entry)
    # The log has one block per function: those of the entry come after its own line.
    block = re.search(rf"Compiling entry function '{re.escape(entry)}'.*?Used (\d+) registers([^\n]*)", log, re.DOTALL)
    frame = re.search(rf"Function properties for {re.escape(entry)}\n[^\n]*?{_FRAME.pattern}", log)
    if block is None or frame is None:
        raise CompileError(f"the compiler's log says nothing about {entry}", where=entry, details=log)
    smem = re.search(r"(\d+) bytes smem", block[2])
    static_smem = int(smem[1]) if smem else 0
    pairs = {"registers": (registers, int(block[1])), "stack bytes": (stack, int(frame[1]))}
    if smem_section not in (static_smem, static_smem + _SMEM_RESERVED_BYTES):
        pairs["static shared memory bytes"] = (smem_section, static_smem)
    for what, (in_elf, in_log) in pairs.items():
        if in_elf != in_log:
            raise CompileError(f"{what}: the cubin says {in_elf}, the log says {in_log}", where=entry, details=log,
                               next="report it with the NVRTC version: runtime/compile/cubin.py misreads one of them")
    frames = [tuple(map(int, found)) for found in _FRAME.findall(log)]  # functions that were not inlined spill too
    return Resources(registers, max(f[0] for f in frames), sum(f[1] for f in frames), sum(f[2] for f in frames),
                     code, static_smem, tuple(line.strip() for line in _WARNING.findall(log)))


def _from_elf(image: bytes, entry: str) -> tuple[int, int, int, int]:
    """(registers, stack bytes, code bytes, bytes of the static shared-memory section) of `entry`."""
    from elftools.elf.elffile import ELFFile  # only a real compile pays for it

    elf = ELFFile(io.BytesIO(image))
    sections: dict[str, Any] = {section.name: section for section in elf.iter_sections()}
    if f".text.{entry}" not in sections:
        kernels = sorted(name.removeprefix(".text.") for name in sections if name.startswith(".text."))
        raise CompileError(f"no kernel {entry} in the cubin", where=entry, allowed=", ".join(kernels) or "no kernel",
                           next='declare it extern "C" __global__')
    symbols = [symbol.name for symbol in sections[".symtab"].iter_symbols()]
    values: dict[int, int] = {}
    for attribute, payload in _attributes(sections[".nv.info"].data()):
        if attribute in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE):
            symbol, value = struct.unpack("<II", payload)
            if symbols[symbol] == entry:
                values[attribute] = value
    shared = sections.get(f".nv.shared.{entry}")
    return (values[_EIATTR_REGCOUNT], values[_EIATTR_FRAME_SIZE], sections[f".text.{entry}"]["sh_size"],
            shared["sh_size"] if shared else 0)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of an .nv.info section; attributes without a payload have it empty."""
    at = 0
    while at + 4 <= len(data):
        kind, attribute, length = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _SIZED_FORMAT:
            length = 0
        yield attribute, data[at:at + length]
        at += length
