"""Remote profiling: what calls and passes do on other workers, in the profiler of the worker that began them."""
