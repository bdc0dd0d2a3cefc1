"""``python -m conformance``: run PyTorch's suites against telegrad and print a table of the results."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import os
import re
import sys
import time

from conformance.exceptions import REASONS, differences, excluded
from conformance.runner import LIMIT, TestRun, run
from conformance.suites import SUITES, Suite

_RAISED = re.compile(r"\w[\w.]*(Error|Exception|Iteration|Exceeded|Lost)\b")


def main() -> int:
    """Run the suites, print the table, and return 0 if no test failed that should pass."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="default: all of them")
    parser.add_argument("-k", metavar="PATTERN", default="*", help="only tests with matching names, such as test_rref*")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="only tests I, I + N, I + 2N, ...")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="tests to run in parallel")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each test N times")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="time limit of one test")
    parser.add_argument("--native", action="store_true", help="run against torch's own RPC, to check the runner")
    parser.add_argument("--simulate", action="store_true", help="run the suites for CUDA, on simulated devices")
    parser.add_argument("--all", action="store_true", help="also run the tests that exceptions.toml excludes")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the output of failed tests")
    options = parser.parse_args()
    unknown = set(options.suites) - {suite.name for suite in SUITES}
    if unknown:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; choose from {', '.join(s.name for s in SUITES)}")

    if options.simulate and options.native:
        parser.error("torch's own RPC supports no devices but CUDA's")
    if not options.native:
        import telegrad.drop_in

        telegrad.drop_in.install()
    import torch  # imported after install(), which replaces its modules

    suites = [suite for suite in SUITES if not options.suites or suite.name in options.suites]
    if options.simulate:
        suites = [dataclasses.replace(suite, simulated=True) for suite in suites if suite.agent == "cuda"]
    exceptions = {} if options.native or options.all else excluded(simulated=options.simulate)
    if not torch.cuda.is_available():
        exceptions.update(
            {
                (s.name, test): f"{REASONS['cuda']}, which this machine does not have"
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

    def show(result: TestRun) -> None:
        print(f"{result.status:8}{result.seconds:6.1f} s  {result.suite}: {result.test}", flush=True)
        if result.status == "failed" and options.verbose:
            print(result.text, result.output[-60000:], sep="\n", flush=True)

    started = time.monotonic()
    results = run(tests, jobs=options.jobs, limit=options.limit, differ=known, on_end=show)
    left_out = [
        (suite.name, test, exceptions[suite.name, test]) for suite, test in chosen if (suite.name, test) in exceptions
    ]
    _table([suite.name for suite in suites], results, left_out)
    _summary(chosen, results)
    print(f"\n{len(results)} tests in {time.monotonic() - started:.0f} s")
    for result in results:
        if result.status == "passed" and result.name in known:
            print(f"{result.suite}: {result.test} passes: remove it from [differs] in exceptions.toml")
    return 1 if any(result.status == "failed" for result in results) else 0


def _table(suites: list[str], results: list[TestRun], left_out: list[tuple[str, str, str]]) -> None:
    statuses = ("passed", "failed", "differs", "skipped")
    print(f"\n{'suite':24}{''.join(f'{title:>10}' for title in (*statuses, 'excluded'))}")
    total = [0] * (len(statuses) + 1)
    for name in suites:
        found = [result.status for result in results if result.suite == name]
        row = [*(found.count(status) for status in statuses), sum(suite == name for suite, _, _ in left_out)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        print(f"{name:24}{''.join(f'{number:10}' for number in row)}")
    print(f"{'total':24}{''.join(f'{number:10}' for number in total)}")
    for title, lines in (
        ("failed", [f"{r.suite}: {r.test}: {_first_error(r.text)}" for r in results if r.status == "failed"]),
        ("differs on purpose", [_show_difference(r) for r in results if r.status == "differs"]),
        ("skipped by the suite itself", [f"{r.suite}: {r.test}: {r.text}" for r in results if r.status == "skipped"]),
        ("excluded", [f"{suite}: {test}: {reason}" for suite, test, reason in left_out]),
    ):
        if lines:
            print(f"\n{title}:")
        for line in sorted(set(lines)):
            print(f"  {line}")


def _summary(chosen: list[tuple[Suite, str]], results: list[TestRun]) -> None:
    """Print how many tests passed of those that can pass on this machine."""
    needing = sum(suite.needs_cuda(test) for suite, test in chosen)
    passed = sum(result.status == "passed" for result in results)
    print(f"\nof {len(chosen)} tests {needing} need CUDA; of the other {len(chosen) - needing}, {passed} passed")


def _show_difference(result: TestRun) -> str:
    return f"{result.suite}: {result.test}: {differences()[result.name]}"


def _first_error(text: str) -> str:
    """Return the line of a traceback with the exception, of the first process that failed."""
    raised = [line for line in text.splitlines() if _RAISED.match(line)]
    lines = raised or text.strip().splitlines() or [""]
    return lines[0][:200]


if __name__ == "__main__":
    sys.exit(main())
