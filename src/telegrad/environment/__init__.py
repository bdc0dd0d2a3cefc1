"""What the environment variables of launchers say about this worker. Pure: from a mapping to its place in a group."""
