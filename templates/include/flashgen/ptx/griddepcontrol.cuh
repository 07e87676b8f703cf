// griddepcontrol (PTX ISA 9.7.13.13): a kernel that starts while the one before it in the stream still runs.
#pragma once
#include "flashgen/prelude.cuh"

// griddepcontrol.wait: returns when the kernels before have ended and all they wrote is visible. At once where there
// is none.
FG_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents: the next kernel may start once every block has said so or ended.
FG_DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
