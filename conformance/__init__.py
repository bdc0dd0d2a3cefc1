"""PyTorch's own suites for RPC and distributed autograd, run against telegrad through the drop-in.

The suites ship inside the torch package and are not copied here. ``make conformance`` runs them all.
"""
