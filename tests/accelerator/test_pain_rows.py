"""Each thing that users of Accelerate ran into, and that a CPU can show, has a test here.

The numbers are those of threads in its tracker. Most tests carry the number in their name; the others are named below.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ROWS = (
    # accumulation
    *(1847, 3017, 960, 4248),
    # loaders
    *(2016, 2823, 3996, 3242, 4195, 4165, 4295, 4235, 4071, 2157, 2333, 209, 2334, 1370, 3849, 2023, 2392, 882, 679),
    *(2285, 3520, 4075, 4199, 3485, 2750, 3393, 4053, 961, 654),
    # metrics
    *(226, 952, 1674, 2537, 1383, 1925, 3693),
    # checkpoints
    *(438, 1601, 3306, 2807, 2684, 3960, 685),
    # precision, schedules, trackers
    *(3477, 273, 662, 2318, 843, 690, 1170, 3875, 3963),
    # launching
    *(2741, 3406, 261, 1217, 53, 1195, 1131, 2463),
    # big models, memory
    *(1548, 4083, 2129, 84, 739, 4160),
)

ELSEWHERE = {
    654: "accelerator/test_loaders.py::test_2157_2333_2823_a_seedable_shuffle_depends_on_the_epoch_and_on_nothing_else",
    3963: "accelerator/test_each_tracker.py::test_trackio_is_told_the_step",
    2741: "cli/test_resolve.py::test_the_cpu_means_the_cpu_and_as_many_as_asked_for",
    3406: "peer/test_scripts.py::test_scripts_of_the_peer_pass",
    261: "cli/test_resolve.py::test_the_cpu_means_the_cpu_and_as_many_as_asked_for",
    1217: "cli/test_config_file.py::test_two_machines_are_two",
    53: "cli/test_test.py::test_what_is_started",
    1195: "cli/test_flags.py::test_what_follows_the_script_is_the_script_s",
    4160: "accelerator/test_memory.py::test_another_way_to_reduce_is_used_in_both_forms",
}


def names() -> dict[str, set[str]]:
    """The test functions of each file."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
        found[str(path.relative_to(TESTS))] = functions
    return found


NAMES = names()
NUMBERS = {int(n) for found in NAMES.values() for name in found for n in re.findall(r"(?<=_)\d{2,5}(?=_)", name)}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_test(row: int) -> None:
    if row in ELSEWHERE:
        file, _, name = ELSEWHERE[row].partition("::")
        assert name in NAMES[file]
    else:
        assert row in NUMBERS
