"""``python -m conformance``: run PyTorch's suites against telegrad, and print what passed."""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
import time

from conformance.exceptions import REASONS, differences, left_out
from conformance.runner import LIMIT, Outcome, run
from conformance.suites import SUITES, Suite

_RAISED = re.compile(r"\w[\w.]*(Error|Exception|Iteration|Exceeded|Lost)\b")


def main() -> int:
    """Run, print the table, and return 0 if nothing failed that should have passed."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="default: all of them")
    parser.add_argument("-k", metavar="PATTERN", default="*", help="only tests whose name fits, as test_rref*")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="only the tests I, I + N, I + 2 N, ... of these")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="tests that run at one time")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each test N times")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="what one test may take")
    parser.add_argument(
        "--native", action="store_true", help="run against torch's own RPC: shows that the runner works"
    )
    parser.add_argument("--all", action="store_true", help="also run the tests that exceptions.toml leaves out")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the output of failed tests")
    options = parser.parse_args()
    unknown = set(options.suites) - {suite.name for suite in SUITES}
    if unknown:
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SUITES)}")

    if not options.native:
        import telegrad.drop_in

        telegrad.drop_in.install()
    import torch  # only now, or its modules would not be replaced

    suites = [suite for suite in SUITES if not options.suites or suite.name in options.suites]
    exceptions = {} if options.native or options.all else left_out()
    if not torch.cuda.is_available():
        exceptions.update(
            {
                (s.name, test): f"{REASONS['cuda']}, and there is none here"
                for s in suites
                for test in s.tests()
                if s.needs_cuda(test)
            }
        )
    chosen = [
        (suite, test)
        for _ in range(options.repeat)
        for suite in suites
        for test in suite.tests()
        if fnmatch.fnmatch(test, options.k)
    ]
    part, parts = (int(number) for number in options.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    tests = [(suite, test) for suite, test in chosen if (suite.name, test) not in exceptions]

    known = {} if options.native else differences()

    def show(outcome: Outcome) -> None:
        print(f"{outcome.verdict:8}{outcome.seconds:6.1f} s  {outcome.suite}: {outcome.test}", flush=True)
        if outcome.verdict == "failed" and options.verbose:
            print(outcome.text, outcome.output[-60000:], sep="\n", flush=True)

    started = time.monotonic()
    outcomes = run(tests, jobs=options.jobs, limit=options.limit, differ=known, on_end=show)
    out = [
        (suite.name, test, exceptions[suite.name, test]) for suite, test in chosen if (suite.name, test) in exceptions
    ]
    _table([suite.name for suite in suites], outcomes, out)
    _summary(chosen, outcomes)
    print(f"\n{len(outcomes)} tests in {time.monotonic() - started:.0f} s")
    for outcome in outcomes:
        if outcome.verdict == "passed" and outcome.name in known:
            print(f"{outcome.suite}: {outcome.test} passes: exceptions.toml need not have it among what differs")
    return 1 if any(outcome.verdict == "failed" for outcome in outcomes) else 0


def _table(suites: list[str], outcomes: list[Outcome], left_out: list[tuple[str, str, str]]) -> None:
    verdicts = ("passed", "failed", "differs", "skipped")
    print(f"\n{'suite':24}{''.join(f'{title:>10}' for title in (*verdicts, 'left out'))}")
    total = [0] * (len(verdicts) + 1)
    for name in suites:
        ended = [outcome.verdict for outcome in outcomes if outcome.suite == name]
        row = [*(ended.count(verdict) for verdict in verdicts), sum(suite == name for suite, _, _ in left_out)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        print(f"{name:24}{''.join(f'{number:10}' for number in row)}")
    print(f"{'together':24}{''.join(f'{number:10}' for number in total)}")
    for title, lines in (
        ("failed", [f"{o.suite}: {o.test}: {_last_line(o.text)}" for o in outcomes if o.verdict == "failed"]),
        ("differs, and is meant to", [_show_difference(o) for o in outcomes if o.verdict == "differs"]),
        ("skipped by the suite itself", [f"{o.suite}: {o.test}: {o.text}" for o in outcomes if o.verdict == "skipped"]),
        ("left out", [f"{suite}: {test}: {why}" for suite, test, why in left_out]),
    ):
        if lines:
            print(f"\n{title}:")
        for line in sorted(set(lines)):
            print(f"  {line}")


def _summary(chosen: list[tuple[Suite, str]], outcomes: list[Outcome]) -> None:
    """How many of the tests that can pass on this machine did."""
    needing = sum(suite.needs_cuda(test) for suite, test in chosen)
    passed = sum(outcome.verdict == "passed" for outcome in outcomes)
    print(f"\nof {len(chosen)} tests {needing} need CUDA; of the other {len(chosen) - needing}, {passed} passed")


def _show_difference(outcome: Outcome) -> str:
    return f"{outcome.suite}: {outcome.test}: {differences()[outcome.name]}"


def _last_line(text: str) -> str:
    """The line of a traceback that says what was raised: that of the first process that failed."""
    raised = [line for line in text.splitlines() if _RAISED.match(line)]
    lines = raised or text.strip().splitlines() or [""]
    return lines[0][:200]


if __name__ == "__main__":
    sys.exit(main())
