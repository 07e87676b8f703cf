// Host twin of ptx/wgmma_shapes.cuh.
#pragma once
#include "flashgen/ptx/wgmma.cuh"  // which has every shape
