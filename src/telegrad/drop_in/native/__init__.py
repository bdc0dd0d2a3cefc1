"""Stands in for the C++ modules beneath torch.distributed.rpc and .autograd, which programs take names from, too."""
