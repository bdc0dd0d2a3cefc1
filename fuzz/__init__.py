"""Fuzzing: every parser of bytes that a peer, a stranger or the rendezvous store can choose.

``make fuzz`` runs the targets with atheris. The targets themselves need no atheris: `tests/fuzz` replays the committed
corpus through them. `fuzz.live` has a hostile member attack a running agent.
"""
