"""Products and quantizers in C for a CPU, built on the machine that runs them.

A BLAS multiplies for one expert after the other, and its threads meet at the end of each small product. Here
one call multiplies for many experts, and threads meet once. No compiler is needed to install or to run:
without one torch does the same arithmetic.

- `products.c`, `rounding.c`: the kernels.
- `library`: builds them once for this processor, keeps the result, loads it.
- `kernels`: calls them with tensors.
"""
