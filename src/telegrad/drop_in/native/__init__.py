"""Replacements for the C++ modules beneath torch.distributed.rpc and .autograd, whose names programs import too."""
