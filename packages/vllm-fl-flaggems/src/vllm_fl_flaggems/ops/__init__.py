"""The operators of the catalogue over the kernels, with what each of them takes.

Two ways to call a kernel, told apart by ``is_compiling()``:

* Eager code, and code that captures a CUDA graph, launches the kernel directly and overwrites the
  donated arguments: a custom operator would add several microseconds of dispatch to each call,
  more than a small kernel runs.
* torch.compile sees an opaque operator of the library ``vllm_fl_flaggems`` that changes none of its
  arguments (see :mod:`vllm_fl_flaggems.ops.library`). Were the launch traced, the choice of tiles
  would become guards on the number of tokens, and one choice would serve every size of a graph
  compiled once for all of them. An operator that overwrote its arguments would be made functional
  with copies wherever its inputs are slices (query and key of a packed projection), while writing
  elsewhere moves the same bytes.
"""
