#!/usr/bin/env python3
"""Makes the task sets in this folder with reasoning-gym. Reads nothing but the package; the same files every time.

    python3 -m venv /tmp/rg && /tmp/rg/bin/pip install reasoning-gym==0.1.25
    /tmp/rg/bin/python tasks/make_tasks.py            # writes
    /tmp/rg/bin/python tasks/make_tasks.py --check    # writes nothing; fails if a file differs from what would be written

`sums`        `chain_sum`, two terms of two digits.
`calculator`  `basic_arithmetic`, three terms of two digits, exactly one of the two operators a product, no parentheses,
              so that a binary calculator has to be called twice, in the order that precedence asks for.

Two things differ from what the package hands out, both on purpose:
- without parentheses, `basic_arithmetic` 0.1.25 computes from left to right: its answer to `50 + 83 * 6` is 798.
  We keep its expressions and questions and compute the answers with the usual precedence (548).
- its operands run from 0 to 100 there; we take only expressions whose operands all have two digits.

Problems are compared after sorting the operands of + and *, so `12 + 34` and `34 + 12` are one problem: each occurs once,
and none of the held-out set is in the training set.
"""

import argparse
import json
import pathlib
import re
import sys
from importlib.metadata import version

import reasoning_gym

PACKAGE_VERSION = "0.1.25"
HELDOUT_COUNT = 256
TRAIN_COUNT = 1744  # 2000 problems in each set
TWO_DIGITS = {"min_digits": 2, "max_digits": 2}
# The package draws item i of a data set with seed + i, so seeds must lie further apart than any index that is used.
SEEDS = {("sums", "heldout"): 10_000_000, ("sums", "train"): 20_000_000,
         ("calculator", "heldout"): 30_000_000, ("calculator", "train"): 40_000_000}
SETS = {
    "sums": ("chain_sum", {"min_terms": 2, "max_terms": 2, **TWO_DIGITS}),
    "calculator": ("basic_arithmetic", {"min_terms": 3, "max_terms": 3, "operators": ("+", "-", "*"),
                                        "allow_parentheses": False, "allow_negation": False, **TWO_DIGITS}),
}


def sums_of_products(expression: str) -> list[tuple[int, list[int]]]:
    """`91 - 17 * 23` as signed products, [(1, [91]), (-1, [17, 23])], factors sorted."""
    tokens = expression.split(" ")
    terms = [(1, [int(tokens[0])])]
    for op, number in zip(tokens[1::2], tokens[2::2], strict=True):
        if op == "*":
            terms[-1][1].append(int(number))
        else:
            terms.append((1 if op == "+" else -1, [int(number)]))
    return [(sign, sorted(factors)) for sign, factors in terms]


def value(expression: str) -> int:
    total = 0
    for sign, factors in sums_of_products(expression):
        for factor in factors:
            sign *= factor
        total += sign
    return total


def problem(expression: str) -> str:
    """Equal for expressions that only differ in the order of what commutes."""
    return repr(sorted(sums_of_products(expression)))


def fits(set_name: str, expression: str) -> bool:
    tokens = expression.split(" ")
    two_digits = all(re.fullmatch("[1-9][0-9]", t) for t in tokens[::2])
    return two_digits and (set_name == "sums" or tokens.count("*") == 1)


def tasks(set_name: str, part: str, count: int, taken: set[str]) -> list[dict]:
    """The first `count` fitting, new problems; adds them to `taken`."""
    dataset_name, config = SETS[set_name]
    data = reasoning_gym.create_dataset(dataset_name, size=1_000_000, seed=SEEDS[set_name, part], **config)
    found = []
    for index in range(1_000_000):
        if len(found) == count:
            return found
        item = data[index]
        expression = item["metadata"]["expression"]
        if not fits(set_name, expression) or problem(expression) in taken:
            continue
        taken.add(problem(expression))
        answer = str(value(expression))
        if set_name == "sums":
            assert answer == item["answer"], item
        assert data.score_answer(answer, {**item, "answer": answer}) == 1.0, item
        found.append({
            "id": f"{set_name}-{part}-{len(found) + 1:06}",
            "question": item["question"],
            "expression": expression,
            "answer": answer,
            "metadata": {"index": index},
        })
    sys.exit(f"{set_name}/{part}: only {len(found)} of {count} problems found")


def check(set_name: str, parts: dict[str, list[dict]]) -> None:
    """What the files promise, from the lines alone."""
    lines = [task for part in parts.values() for task in part]
    problems = {name: {problem(t["expression"]) for t in part} for name, part in parts.items()}
    assert len({t["id"] for t in lines}) == len(lines), "ids"
    assert not problems["train"] & problems["heldout"], "overlap"
    assert sum(map(len, problems.values())) == len(lines), "duplicates"
    for t in lines:
        assert t["expression"] in t["question"] and fits(set_name, t["expression"]), t
        assert int(t["answer"]) == eval(t["expression"]), t  # digits, spaces, + - * only: `fits` saw to it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file differs")
    only_check = parser.parse_args().check
    if version("reasoning-gym") != PACKAGE_VERSION:
        sys.exit(f"reasoning-gym: expected {PACKAGE_VERSION}, got {version('reasoning-gym')}")
    here = pathlib.Path(__file__).parent
    for set_name in SETS:
        taken: set[str] = set()
        # Held out first: what is in it can then never be in the training set.
        parts = {part: tasks(set_name, part, count, taken)
                 for part, count in (("heldout", HELDOUT_COUNT), ("train", TRAIN_COUNT))}
        check(set_name, parts)
        for part, items in parts.items():
            text = "".join(json.dumps(t, separators=(",", ":")) + "\n" for t in items)
            path = here / set_name / f"{part}.jsonl"
            if only_check:
                if path.read_text() != text:
                    sys.exit(f"{path}: differs from what {pathlib.Path(__file__).name} writes")
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            print(f"{path.relative_to(here)}: {len(items)} tasks, {len(text)} bytes")


if __name__ == "__main__":
    main()
