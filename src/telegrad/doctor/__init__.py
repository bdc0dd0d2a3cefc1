"""`telegrad doctor`: finds what is wrong with a machine, its settings and its network, and says what to do about it."""
