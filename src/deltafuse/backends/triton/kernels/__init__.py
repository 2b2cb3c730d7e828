"""Triton kernels and the functions that launch them: tensors in, tensors out, no autograd. Importing needs Triton."""
