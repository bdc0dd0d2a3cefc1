"""Remote references: handles, the values they refer to, and the bookkeeping that keeps those values alive."""
