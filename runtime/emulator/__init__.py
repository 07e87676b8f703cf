"""Runs the generated CUDA text on the CPU, under a checker that sees every load, store and synchronisation.

`docs/emulator.md` explains the model. C++ in `src/` (the machine) and `host/` (the second implementation of the PTX
drawer); Python compiles, launches in a worker process, and words the reports.
"""
