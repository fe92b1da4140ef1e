"""Where numbers go: `tensorboard`, `csv_monitor`, `wandb`, `comet`, `comms_logger`, `timers`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from shardwise.config.fields import Bool, Flag, Integer, Names, Secret, Section, Text
from shardwise.config.says import Says, When, enabled

Words = Annotated[str, BeforeValidator(Text())]
MaybeWords = Annotated[str | None, BeforeValidator(Text())]

_TENSORBOARD, _CSV = enabled("tensorboard"), enabled("csv_monitor")
_WANDB, _COMET, _COMMS = enabled("wandb"), enabled("comet"), enabled("comms_logger")


def _prints(config: Any) -> bool:
    return config.steps_per_print is not None or bool(config.wall_clock_breakdown)


def _records(config: Any) -> bool:
    trackers = (config.tensorboard, config.csv_monitor, config.wandb, config.comet)
    return _prints(config) or any(tracker.enabled for tracker in trackers)


_PRINTS = When("only with log lines (steps_per_print)", _prints)
_RECORDS = When("only with log lines (steps_per_print) or a tracker", _records)


class TensorBoardSection(Section):
    """`tensorboard`: events for TensorBoard."""

    enabled: Annotated[Bool, Says({True: "rank 0 writes events for TensorBoard", False: "off"})] = False
    output_path: Annotated[Words, Says("the folder; empty: the working directory", _TENSORBOARD)] = ""
    job_name: Annotated[Words, Says("the folder inside it", _TENSORBOARD)] = "DeepSpeedJobName"


class CSVMonitorSection(Section):
    """`csv_monitor`: one CSV file a value."""

    enabled: Annotated[Bool, Says({True: "rank 0 writes a CSV file a value", False: "off"})] = False
    output_path: Annotated[Words, Says("the folder; empty: the working directory", _CSV)] = ""
    job_name: Annotated[Words, Says("the folder inside it", _CSV)] = "DeepSpeedJobName"


class WandbSection(Section):
    """`wandb`: a run at Weights & Biases."""

    enabled: Annotated[Bool, Says({True: "rank 0 logs to Weights & Biases", False: "off"})] = False
    group: Annotated[MaybeWords, Says("the run's group", _WANDB)] = None
    team: Annotated[MaybeWords, Says("the run's entity", _WANDB)] = None
    project: Annotated[Words, Says("the run's project", _WANDB)] = "deepspeed"


class CometSection(Section):
    """`comet`: an experiment at Comet."""

    enabled: Annotated[Bool, Says({True: "rank 0 logs to Comet", False: "off"})] = False
    samples_log_interval: Annotated[
        int,
        BeforeValidator(Integer(1, note="samples")),
        Says("a value is logged at most once every {} samples", _COMET),
    ] = 100
    project: Annotated[MaybeWords, Says("the project", _COMET)] = None
    workspace: Annotated[MaybeWords, Says("the workspace", _COMET)] = None
    api_key: Annotated[
        str | None, BeforeValidator(Secret()), Says("the key to the account", _COMET, secret=True), Field(repr=False)
    ] = None
    experiment_name: Annotated[MaybeWords, Says("the experiment's name", _COMET)] = None
    experiment_key: Annotated[MaybeWords, Says("the experiment that is gone on with", _COMET)] = None
    online: Annotated[bool | None, BeforeValidator(Flag()), Says("false: written to disk only", _COMET)] = None
    mode: Annotated[
        str | None,
        BeforeValidator(Text({"get": "get", "create": "create", "get_or_create": "get_or_create"})),
        Says("whether an experiment is made or gone on with", _COMET),
    ] = None


class CommsLoggerSection(Section):
    """`comms_logger`: what the collectives cost."""

    enabled: Annotated[Bool, Says({True: "collectives are counted, and reported at the end", False: "off"})] = False
    verbose: Annotated[Bool, Says("whether each collective gets a log line", _COMMS)] = False
    prof_all: Annotated[Bool, Says("whether all collectives are reported, or those of prof_ops", _COMMS)] = True
    debug: Annotated[Bool, Says("whether lines name what travelled", _COMMS)] = False
    prof_ops: Annotated[Names, Says("the collectives that are reported, without prof_all", _COMMS)] = Field(
        default_factory=list
    )


class ThroughputSection(Section):
    """`timers.throughput`: samples and tokens a second."""

    enabled: Annotated[Bool, Says("whether log lines and trackers get samples and tokens a second", _RECORDS)] = True
    synchronized: Annotated[Bool, Says("whether the device is waited for at log lines", _PRINTS)] = True


class TimersSection(Section):
    """`timers`."""

    throughput: ThroughputSection = Field(default_factory=ThroughputSection)
