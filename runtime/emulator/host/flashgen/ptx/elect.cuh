// Host twin of ptx/elect.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE bool elect_one() { return emu::elect_one(); }
