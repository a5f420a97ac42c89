"""What every kernel means, written in PyTorch.

Each function here is the twin of a fast kernel: same name, same arguments, same
result.  It is what runs on a CPU, what a test compares the fast kernel with, and the
shortest description of what the fast kernel is for.

Three rules hold for all of them:

* Plain tensors and ints go in, plain tensors come out; no class of this library.
* float64 in means float64 arithmetic; everything else is computed in float32 and
  rounded once, at the end.
* Rows past the last group (the *tail*) may hold anything, NaN included.  No result
  depends on them, and an output's own tail is exact zeros.
"""
