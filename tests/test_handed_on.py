"""What the launcher hands on, written and read again."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shardwise.cli.flags import Flags
from shardwise.errors import ConfigError
from shardwise.handed_on import TABLE, as_flags, read, written


def test_every_row_is_a_flag_and_a_name_of_its_own() -> None:
    assert {row.flag for row in TABLE} <= {field.name for field in fields(Flags)}
    assert len({row.variable for row in TABLE}) == len({row.flag for row in TABLE}) == len(TABLE)
    assert all(row.variable.startswith("ACCELERATE_") and row.argument for row in TABLE)


def test_what_is_written_is_read() -> None:
    values = {
        "mixed_precision": "bf16",
        "cpu": True,
        "gradient_accumulation_steps": 4,
        "dynamo_backend": "inductor",
        "debug": True,
        "use_deepspeed": True,
        "deepspeed_config_file": "/a b/ds.json",
        "zero_stage": 3,
        "gradient_clipping": 0.5,
        "zero3_init_flag": False,
        "zero3_save_16bit_model": True,
    }
    assert set(values) == {row.flag for row in TABLE}
    assert read(written(values)) == values
    assert read({"HOME": "x"}) == {} == written({"cpu": None, "nproc": 2})


def test_what_others_write_is_read() -> None:
    # Accelerate's launcher writes True, False and yes; a job file may write 1.
    assert read({"ACCELERATE_USE_CPU": "False", "ACCELERATE_DEBUG_MODE": "1"}) == {"cpu": False, "debug": True}
    assert read({"ACCELERATE_USE_CPU": "yes", "ACCELERATE_MIXED_PRECISION": "FP16"})["mixed_precision"] == "fp16"


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("ACCELERATE_USE_CPU", "maybe", "true or false"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "one of no, fp16, bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2.5", "an integer"),
        ("ACCELERATE_GRADIENT_CLIPPING", "x", "a number"),
    ],
)
def test_what_cannot_be_meant_is_named(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}={text}: expected {expected}"):
        read({variable: text})


def test_as_options_again() -> None:
    told = written({"cpu": True, "zero_stage": 2, "use_deepspeed": True, "zero3_init_flag": "true", "debug": None})
    assert as_flags(told) == ["--cpu", "--use_deepspeed", "--zero_stage", "2", "--zero3_init_flag", "true"]
