"""Draw the pictures of docs/backward.md from code, so that they can be reviewed and compared as text.

``python docs/pictures.py`` writes ``docs/pictures/*.svg``. A test compares the committed files with its output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drawing import ACK, BAD, FAINT, GRADIENT, INK, Picture

FOLDER = Path(__file__).parent / "pictures"


def recording() -> Picture:
    """One call, as recorded in the graphs of two workers."""
    p = Picture(
        920, 372, "One call in a context: a send and a recv for the request, and a send and a recv for the reply"
    )
    p.area(20, 16, 390, 250, "worker a")
    p.area(510, 16, 390, 250, "worker b")
    x, token1 = p.node(90, 90, "leaf x", "leaf"), p.node(320, 90, "token of x", "token")
    loss, total, recv2 = (
        p.node(70, 210, "loss", "root"),
        p.node(175, 210, "sum"),
        p.node(320, 210, "recv m2: y", "recv"),
    )
    recv1, mul, w = p.node(600, 90, "recv m1: x", "recv"), p.node(760, 150, "mul"), p.node(850, 90, "leaf w", "leaf")
    token2 = p.node(600, 210, "token of y", "token")
    p.text(320, 64, "SendRpcBackward m1", size=11, ink=FAINT)
    p.text(600, 64, "RecvRpcBackward m1", size=11, ink=FAINT)
    p.text(320, 246, "RecvRpcBackward m2", size=11, ink=FAINT)
    p.text(600, 246, "SendRpcBackward m2", size=11, ink=FAINT)
    for start, end in ((token1, x), (loss, total), (total, recv2), (token2, mul), (mul, recv1), (mul, w)):
        p.edge(start, end, ink=GRADIENT)
    p.edge(token1, recv1, dash="6 4", thick=2)
    p.edge(token2, recv2, dash="6 4", thick=2)
    p.text(460, 78, "request", size=11)
    p.text(460, 198, "reply", size=11)
    p.line((40, 300), (90, 300), ink=GRADIENT)
    p.lines(102, 304, ["edge of torch's graph: gradients will flow along it"])
    p.line((40, 330), (90, 330), dash="6 4", thick=2)
    p.lines(102, 334, ["message of the forward pass: values travel now, gradients later come back the other way"])
    return p


def _chain(p: Picture, bottom: float) -> tuple[float, float, float]:
    """Draw three workers side by side; time runs downwards."""
    places = 170.0, 470.0, 770.0
    for x, name in zip(places, ("worker a", "worker b", "worker c"), strict=True):
        p.lifeline(x, name, bottom)
    return places


def plain() -> Picture:
    """A pass in which every island has one entry."""
    p = Picture(940, 430, "A plain pass over three workers: each island starts when its gradient arrives")
    a, b, c = _chain(p, 410)
    p.bar(a, 80, 150)
    p.bar(b, 120, 200)
    p.bar(c, 170, 260)
    p.bar(b, 250, 330)
    p.bar(a, 320, 380)
    p.line((a + 7, 100), (b - 7, 120), ink=GRADIENT, thick=2)
    p.text((a + b) / 2, 98, "gradient of y, for send m4", size=11, ink=GRADIENT)
    p.line((b + 7, 150), (c - 7, 170), ink=GRADIENT, thick=2)
    p.text((b + c) / 2, 148, "gradient for send m3", size=11, ink=GRADIENT)
    p.line((c - 7, 230), (b + 7, 250), ink=GRADIENT, thick=2)
    p.text((b + c) / 2, 228, "gradient for send m2", size=11, ink=GRADIENT)
    p.line((b - 7, 300), (a + 7, 320), ink=GRADIENT, thick=2)
    p.text((a + b) / 2, 298, "gradient of x, for send m1", size=11, ink=GRADIENT)
    p.text(a - 16, 112, "island of the roots", size=11, at="end")
    p.text(a - 16, 128, "still running", size=11, ink=FAINT, at="end")
    p.text(a - 16, 355, "island of m1", size=11, at="end")
    p.text(b + 16, 192, "island of m4", size=11, at="start")
    p.text(b + 16, 300, "island of m2", size=11, at="start")
    p.text(c + 16, 218, "island of m3", size=11, at="start")
    p.text(
        470,
        18,
        "A gradient is sent as soon as the engine reaches the recv; the island continues. Time runs downwards.",
        ink=FAINT,
    )
    return p


def over() -> Picture:
    """The same pass, with its acknowledgements."""
    p = Picture(940, 520, "Termination: the message that engaged a worker is acknowledged last, every other at once")
    a, b, c = _chain(p, 500)
    p.bar(a, 80, 455, "#eef2f7", ink=FAINT)
    p.bar(b, 110, 430, "#dbe8fd", ink=ACK)
    p.bar(c, 150, 330, "#dbe8fd", ink=ACK)

    def gradient(start: float, end: float, y: float, name: str) -> None:
        p.line((start, y), (end, y + 20), ink=GRADIENT)
        p.text((start + end) / 2, y + 2, name, size=11, ink=GRADIENT)

    def acknowledge(start: float, end: float, y: float, name: str) -> None:
        p.line((start, y), (end, y + 20), ink=ACK, dash="6 4", thick=2)
        p.text((start + end) / 2, y + 29, name, size=11, ink=ACK)

    gradient(a + 7, b - 7, 90, "m4: engages b")
    gradient(b + 7, c - 7, 130, "m3: engages c")
    gradient(c - 7, b + 7, 190, "m2: b is already engaged")
    acknowledge(b + 7, c - 7, 222, "acknowledged at once")
    gradient(b - 7, a + 7, 250, "m1: a started the pass")
    acknowledge(a + 7, b - 7, 282, "acknowledged at once")
    acknowledge(c - 7, b + 7, 330, "m3: c is idle, all its messages are acked")
    acknowledge(b - 7, a + 7, 430, "m4: b is idle, all its messages are acked")
    p.text(a - 16, 460, "a is idle and all its", size=11, at="end")
    p.text(a - 16, 476, "messages are acked:", size=11, at="end")
    p.text(a - 16, 492, "the group is quiet", size=11, at="end", bold=True)
    p.text(c + 16, 240, "c is engaged", size=11, at="start", ink=ACK)
    p.text(b + 16, 405, "b is engaged", size=11, at="start", ink=ACK)
    p.text(
        470,
        18,
        "Dashed: acknowledgements (acks). Each says whether islands are partly fed and whether the pass has failed.",
        ink=FAINT,
    )
    return p


def _unused_panel(p: Picture, left: float, title: str, *, step: int) -> None:
    """Draw one stage of a pass in which the tensor of m2 is unused."""
    p.text(left + 145, 24, title, bold=True)
    p.area(left, 40, 290, 110, "worker a")
    p.area(left, 180, 290, 205, "worker b")
    loss, recv4, recv2 = (
        p.node(left + 45, 90, "loss", "root", width=56),
        p.node(left + 135, 90, "recv m4", "recv", width=80),
        p.node(left + 238, 90, "recv m2", "dead" if step == 3 else "recv", width=80),
    )
    p.text(left + 238, 122, "unused", size=11, ink=FAINT)
    token4 = p.node(left + 110, 230, "token m4", "token", width=84)
    token2 = p.node(left + 225, 230, "token m2", "dead" if step == 3 else "token", width=84)
    head, encode = p.node(left + 110, 285, "mul v", width=64), p.node(left + 165, 345, "mul w", width=64)
    done = step == 3
    ink = {1: GRADIENT, 2: ACK, 3: GRADIENT}[step]
    p.edge(loss, recv4, ink=ink)
    p.edge(recv4, token4, ink=ink, dash="6 4" if step != 2 else "2 3", thick=2)
    p.edge(token4, head, ink=INK if step == 1 else ink)
    p.edge(head, encode, ink=INK if step == 1 else ink)
    p.edge(token2, encode, ink=FAINT if done else INK, dash="4 3" if done else "")
    if step == 1:
        p.edge(recv2, token2, ink=FAINT, dash="1 5")
        p.text(left + 72, 290, "m4: arrived", size=11, at="end", ink=GRADIENT)
        p.text(left + 262, 290, "m2: ?", size=11, ink=FAINT)
        p.text(left + 14, 373, "one island, partly fed", size=11, at="start")
    elif step == 2:
        p.text(left + 72, 290, "m4: alive", size=11, at="end", ink=ACK)
        p.text(left + 250, 290, "m2: not reached", size=11, ink=FAINT)
        p.text(left + 14, 373, "the probe only walks; nothing runs", size=11, at="start")
    else:
        p.text(left + 72, 290, "m4 runs", size=11, at="end", ink=GRADIENT)
        p.text(left + 250, 290, "m2: dead", size=11, ink=FAINT)
        p.text(left + 14, 373, "planned again without m2, and run", size=11, at="start")


def unused() -> Picture:
    """An unused output that shares a subgraph with a used one."""
    p = Picture(
        960,
        400,
        "An unused output: the group is quiet with a partly fed island, the probe finds live tensors, the rest runs",
    )
    _unused_panel(p, 15, "1  quiet, but partly fed", step=1)
    _unused_panel(p, 335, "2  the probe", step=2)
    _unused_panel(p, 655, "3  resume", step=3)
    return p


def skip() -> Picture:
    """A skip connection around a remote call, and its gate."""
    p = Picture(940, 420, "A skip connection: the island runs with a gate that waits for the gradient of its own send")
    p.area(20, 16, 560, 300, "worker a")
    p.area(660, 16, 260, 300, "worker b")
    loss, add = p.node(70, 85, "loss", "root"), p.node(180, 85, "add")
    recv2 = p.node(480, 85, "recv m2: r", "recv")
    gate, token = p.node(330, 165, "gate of m1", "gate"), p.node(480, 165, "token of h", "token")
    mul = p.node(300, 255, "h = mul")
    x, w = p.node(110, 285, "leaf x", "leaf"), p.node(110, 230, "leaf w", "leaf")
    token_b, g, recv1 = (
        p.node(750, 85, "token of r", "token"),
        p.node(860, 165, "g"),
        p.node(750, 245, "recv m1: h", "recv"),
    )
    p.area(30, 42, 540, 264, "", dashed=True)
    p.text(560, 298, "one island: the roots and m1", size=11, ink=GRADIENT, at="end")
    for start, end in ((loss, add), (add, recv2), (add, mul), (mul, x), (mul, w), (token, mul)):
        p.edge(start, end, ink=GRADIENT)
    p.edge(gate, token)
    p.edge(recv2, token_b, ink=GRADIENT, dash="6 4", thick=2)
    p.edge(token_b, g, ink=GRADIENT)
    p.edge(g, recv1, ink=GRADIENT)
    p.line((702, 238), (620, 210), (525, 178), ink=GRADIENT, dash="6 4", thick=2)
    p.text(616, 66, "1", bold=True, size=14)
    p.text(330, 140, "2", bold=True, size=14)
    p.text(616, 232, "3", bold=True, size=14)
    p.text(360, 238, "4", bold=True, size=14)
    p.lines(
        30,
        344,
        [
            "1  The engine starts at the loss. The recv sends its gradient; mul still lacks one of its two gradients.",
            "2  Nothing else is ready, so the engine runs the node with the lowest priority: the gate. It waits.",
            "3  Worker b runs its island, and the gradient for m1 arrives. The gate opens and the token passes it on.",
            "4  mul runs once, with the sum of both.",
        ],
    )
    return p


def failure() -> Picture:
    """An error on one worker ends the pass on all of them."""
    p = Picture(940, 420, "Failure: an abort goes to every worker of the context, and late messages reach a tombstone")
    a, b, c = _chain(p, 400)
    p.bar(a, 80, 125)
    p.bar(b, 120, 175)
    p.bar(b, 185, 300, "#fdeac4", ink="#b7791f")
    p.bar(c, 165, 220)
    p.line((a + 7, 100), (b - 7, 120), ink=GRADIENT)
    p.line((b + 7, 145), (c - 7, 165), ink=GRADIENT)
    p.text(c + 16, 200, "island raises", size=11, at="start", ink=BAD)
    p.text(c + 16, 216, "ValueError", size=11, at="start", ink=BAD)
    p.line((c - 7, 220), (b + 7, 290), ink=BAD, thick=2)
    p.line((c - 7, 222), (a + 7, 320), ink=BAD, thick=2, dash="8 3")
    p.line((b - 7, 300), (a + 7, 345), ink=BAD, thick=2)
    p.text(b - 16, 205, "an island waits in a gate", size=11, at="end")
    p.text(b + 16, 335, "gates and waiting threads wake,", size=11, at="start")
    p.text(b + 16, 351, "the island unwinds and frees its buffers", size=11, at="start")
    p.text(c - 20, 252, "abort", size=12, at="end", ink=BAD)
    p.text(b - 150, 268, "abort", size=12, at="end", ink=BAD)
    p.text(a - 16, 322, "backward() raises", size=11, at="end", bold=True)
    p.text(a - 16, 338, "BackwardError: c,", size=11, at="end")
    p.text(a - 16, 354, "with its traceback", size=11, at="end")
    p.line((b + 7, 375), (c - 7, 385), ink=FAINT, dash="6 4")
    p.text((b + c) / 2, 398, "late message: acknowledged, no effect", size=11, ink=FAINT)
    p.node(c + 70, 385, "tombstone", "dead")
    p.text(
        470,
        18,
        "A failed worker sends an abort to every worker it exchanged messages with; each of them does the same.",
        ink=FAINT,
    )
    return p


def higher_order() -> Picture:
    """With create_graph, gradient messages are recorded like any other."""
    p = Picture(
        940,
        462,
        "Higher-order gradients: gradient messages are recorded as sends and recvs; a second pass runs through them",
    )
    p.area(20, 16, 400, 330, "worker a")
    p.area(520, 16, 400, 330, "worker b")
    x, token1 = p.node(90, 70, "leaf x", "leaf"), p.node(340, 70, "token of x", "token")
    loss, recv2 = p.node(100, 140, "loss = Σ y²", "root"), p.node(340, 140, "recv m2: y", "recv")
    double, token3 = p.node(180, 215, "gy = 2 y"), p.node(340, 215, "token of gy", "token")
    total, recv4 = p.node(100, 300, "Σ gx", "root"), p.node(340, 300, "recv g2: gx", "recv")
    recv1, power, token2 = (
        p.node(600, 70, "recv m1: x", "recv"),
        p.node(730, 105, "y = x³"),
        p.node(600, 140, "token of y", "token"),
    )
    recv3, product, token4 = (
        p.node(600, 215, "recv g1: gy", "recv"),
        p.node(760, 257, "gx = 3 x² gy"),
        p.node(600, 300, "token of gx", "token"),
    )
    p.edge(loss, recv2)
    for start, end in ((token1, recv1), (token2, recv2), (token3, recv3), (token4, recv4)):
        p.edge(start, end, ink=FAINT, dash="6 4")
    for start, end in (
        (total, recv4),
        (token4, product),
        (product, recv3),
        (token3, double),
        (double, recv2),
        (token2, power),
        (power, recv1),
        (token1, x),
    ):
        p.edge(start, end, ink=GRADIENT, thick=2)
    p.line((800, 243), (880, 170), (880, 62), (648, 62), ink=GRADIENT, thick=2)
    for y, name in ((62, "m1"), (132, "m2"), (207, "g1"), (292, "g2")):
        p.text(470, y, name, size=11, ink=FAINT)
    p.lines(
        30,
        376,
        [
            "Dashed: messages. m1 and m2 belong to the forward pass. g1 and g2 are the gradient messages of the",
            "first backward: with create_graph=True they are recorded, each with its own send and recv.",
            "Thick: the path of the second pass, from Σ gx. At a recv it continues at that message's token,",
            "against the dashed arrow: over g2, then over g1 and m2, and over m1 to x.",
        ],
    )
    return p


def leaves() -> Picture:
    """Where the gradients of leaves go."""
    p = Picture(940, 300, "Where gradients go: the context, .grad, or only the caller's own tensors")
    columns = (
        (20, 'accumulate="context"', "the default", ["get_gradients(context_id)", "on the leaf's worker"]),
        (330, 'accumulate="grad"', "for ordinary optimizers", ["leaf.grad", "on the leaf's worker"]),
        (
            640,
            "inputs=[...], or grad()",
            "tensors of the caller",
            ["the given tensors", "leaves on other workers get nothing"],
        ),
    )
    for left, title, why, where in columns:
        p.text(left + 140, 24, title, bold=True)
        p.text(left + 140, 42, why, size=11, ink=FAINT)
        p.area(left, 54, 280, 226, "")
        named = title.startswith("inputs")
        mine = p.node(left + 75, 100, "caller's leaf", "leaf", width=116)
        other = p.node(left + 205, 100, "remote leaf", "dead" if named else "leaf", width=100)
        target = p.node(left + 140, 190, where[0], "root", width=230)
        p.edge(mine, target, ink=GRADIENT, thick=2)
        if not named:
            p.edge(other, target, ink=GRADIENT, thick=2)
        p.text(left + 140, 226, where[1], size=11, ink=FAINT)
    p.text(160, 256, "contexts are independent", size=11)
    p.text(470, 256, "all passes add up here", size=11)
    p.text(780, 256, "other workers store nothing", size=11)
    return p


PICTURES: tuple[Callable[[], Picture], ...] = (
    recording,
    plain,
    over,
    unused,
    skip,
    failure,
    higher_order,
    leaves,
)


def draw_all(folder: Path) -> None:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        (folder / f"{picture.__name__}.svg").write_text(picture().svg(), encoding="utf-8")


if __name__ == "__main__":
    draw_all(FOLDER)
