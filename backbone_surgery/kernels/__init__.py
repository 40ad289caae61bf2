"""Kernels for a CPU: products of few rows, and attention of one query, at the speed of the memory.

XLA's products of two to sixteen rows pack the weights anew at each call, and those of one row read
several places of memory in turn, which is half as fast as one after another. The kernels here are
written in LLVM's IR, compiled for the processor at hand by llvmlite, and called by XLA as custom
calls. Without llvmlite (the extra `cpu`) XLA's own products run.
"""
