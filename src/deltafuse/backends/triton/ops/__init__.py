"""Fused operations: one file each, forward and backward over the kernels, bound to autograd and to torch.compile."""
