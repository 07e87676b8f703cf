// Element types: exact to float, and back rounded to nearest even.
#pragma once
#include <cstdint>

#include "../host/emu.h"

namespace emu {

float to_float(Type type, uint16_t bits);
uint16_t from_float(Type type, float x);

}  // namespace emu
