"""Kernels for a CPU, a GPU and a TPU, where XLA's read memory more slowly than it allows.

On a CPU they are products of few rows, and attention of one query. XLA's products of two to sixteen
rows pack the weights anew at each call, and those of one row read several places of memory in turn,
which is half as fast as one after another. The kernels are written in LLVM's IR, compiled for the
processor at hand by llvmlite, and called by XLA as custom calls. Without llvmlite (the extra `cpu`)
XLA's own products run.

On a GPU they are attention of one query (`gpu*.py`), on a GPU and a TPU products with chosen
experts and with weights of four bits (`tpu*.py`), written in Pallas.
"""
