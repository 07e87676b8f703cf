// elect.sync (PTX ISA 9.7.13.14).
#pragma once
#include "flashgen/prelude.cuh"

// True in exactly one lane of a full warp, always the same one.
FG_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}
