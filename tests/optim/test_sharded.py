"""Every optimizer steps a sharded model as it steps the whole one in one process.

Tolerance: in float64 both runs differ by the order of sums only, some 1e-16, which a few steps of a small smooth model
multiply by some hundreds at the most; 1e-10 is far from a missed part of a norm, a matrix or a momentum (1e-3).
Optimizers that divide a gradient by its own size (all of Adam's kin) step an element by its sign where it is smaller
than ``eps``: the inputs are such that no gradient of a used element is that small, but for embeddings that no token
reads, whose gradient is exactly zero.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.optim import Lamb, Lion, Muon, UncorrectedAdam
from tests.optim import textbook
from tests.optim.sharded import CLIP, Case, Make, Net, interrupted, plain, train
from tests.optim.textbook import Textbook

RTOL = 1e-10
STAGES = (0, 1, 2, 3)


class Quiet(torch.optim.AdamW):
    """A subclass with other defaults."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr, weight_decay=0.1)


class Doubled(Lamb):
    """A subclass that does more in its step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.mul_(0.99)


class Normed(torch.optim.Optimizer):
    """Someone's optimizer that looks at whole parameters and counts its steps itself."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"] / self.count)


def muon_by_the_book(params: Any, **settings: Any) -> Textbook:
    """Muon for the hidden matrices of :class:`Net`, AdamW for the rest."""
    matrices, rest = [], []
    for group in params:
        members = group["params"] if isinstance(group, dict) else [group]
        for p in members:
            (matrices if p.shape in ((23, 6), (6, 23), (6, 6), (3, 3)) else rest).append((p, group))

    def rule(p: torch.Tensor, g: torch.Tensor, state: Any, s: Any) -> torch.Tensor:
        return (textbook.muon if s["muon"] else textbook.adamw)(p, g, state, s)

    both = [({"params": [p], "muon": True, **_own(group)}, 0.02) for p, group in matrices]
    both += [({"params": [p], "muon": False, **_own(group)}, 0.01) for p, group in rest]
    listed = [{"lr": lr, **group} for group, lr in both]
    return Textbook(listed, rule, betas=(0.9, 0.95), eps=1e-10, **settings)


def _own(group: Any) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"} if isinstance(group, dict) else {}


def book(update: Any, **settings: Any) -> Make:
    return partial(Textbook, update=update, **settings)


LAMB = {"lr": 0.01, "weight_decay": 0.1}
OURS: list[tuple[Case, Make]] = [
    (Case("lamb", "Lamb", LAMB), book(textbook.lamb, **LAMB)),
    (
        Case("lamb inside", "lamb", {**LAMB, "eps_inside_sqrt": True, "bias_correction": False, "eps": 1e-6}),
        book(textbook.lamb, **LAMB, eps_inside_sqrt=True, bias_correction=False, eps=1e-6),
    ),
    (
        Case("lamb bounds", "Lamb", {"lr": 0.05, "max_coeff": 0.5, "min_coeff": 0.3}, grouped=True),
        book(textbook.lamb, lr=0.05, max_coeff=0.5, min_coeff=0.3),
    ),
    (Case("lamb given", make=partial(Lamb, **LAMB)), book(textbook.lamb, **LAMB)),
    (
        Case("lion", "Lion", {"lr": 0.003, "betas": [0.9, 0.99], "weight_decay": 0.1}, grouped=True),
        book(textbook.lion, lr=0.003, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    (Case("lion given", make=partial(Lion, lr=0.01)), book(textbook.lion, lr=0.01)),
    (
        Case("adam uncorrected", "Adam", {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1}),
        book(textbook.uncorrected_adamw, lr=0.01, weight_decay=0.1),
    ),
    (
        Case("adam l2", "Adam", {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1, "adam_w_mode": False}),
        book(textbook.uncorrected_adam, lr=0.01, weight_decay=0.1),
    ),
    (
        Case("muon", "Muon", {"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.1}, grouped=True),
        partial(muon_by_the_book, weight_decay=0.1),
    ),
    (
        Case("muon standard", "muon", {"lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "ns_method": "standard"}),
        partial(muon_by_the_book, momentum=0.9),
    ),
]

TORCH: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.05, "t0": 3.0},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.02, "lr_decay": 0.1},
    "Adamax": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "NAdam": {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}


def hidden_matrices(params: Any) -> torch.optim.Optimizer:
    """torch's Muon, which takes nothing but matrices: here the two hidden ones."""
    return torch.optim.Muon([p for p in params if p.shape in ((23, 6), (6, 23))], lr=0.02)


UNTESTED = {"zero_allow_untested_optimizer": True}
GIVEN: list[tuple[Case, Make]] = [
    (Case("subclass", make=Quiet), partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)),
    (Case("subclass with a step", make=Doubled, grouped=True), Doubled),
    (Case("unknown", make=Normed, top=UNTESTED, grouped=True), Normed),
    (Case("adafactor", make=torch.optim.Adafactor, grouped=True), torch.optim.Adafactor),
    (Case("uncorrected", make=partial(UncorrectedAdam, lr=0.01)), book(textbook.uncorrected_adamw, lr=0.01)),
]


def check(
    ranks: Any, pairs: list[tuple[Case, Make]], stages: tuple[int, ...] = STAGES, rtol: float = RTOL, size: int = 2
) -> None:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    cases = [(case, stage) for case, _ in pairs for stage in stages]
    runs = ranks(size).run(train, cases, seed)
    references = {case.name: plain(case, make, seed, size) for case, make in pairs}
    for number, (case, stage) in enumerate(cases):
        norms, state = references[case.name]
        assert max(norms) > CLIP, "nothing was clipped"
        for rank in range(size):
            found_norms, found = runs[rank][number]
            torch.testing.assert_close(found_norms, norms, rtol=rtol, atol=0, msg=_msg(case, stage, "norms"))
            for name, value in state.items():
                torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol, msg=_msg(case, stage, name))
        start = case.model(seed).state_dict()
        assert torch.equal(found["unused.weight"], start["unused.weight"]), "an unused parameter was stepped"
        late = "branch.sometimes.weight"
        assert not torch.equal(found[late], start[late]) or "matrices" in case.name


def _msg(case: Case, stage: int, what: str) -> Any:
    return lambda text: f"{case.name}, stage {stage}, {what}: {text}"


def test_our_optimizers_are_those_of_the_books_on_shards(ranks: Any) -> None:
    check(ranks, OURS)


def test_every_class_of_torch_steps_shards_as_it_steps_the_whole(ranks: Any) -> None:
    pairs = [(Case(n, n, s), partial(getattr(torch.optim, n), **s)) for n, s in TORCH.items()]
    check(ranks, [pair for pair in pairs if pair[0].name == "Adafactor"])
    # The matrix of tests/equivalence has the others at stages 1 and 3.
    check(ranks, [pair for pair in pairs if pair[0].name != "Adafactor"], (0, 2))


def test_given_objects_and_subclasses_step_as_in_one_process(ranks: Any) -> None:
    check(ranks, GIVEN)


def test_torchs_muon_gets_whole_matrices(ranks: Any) -> None:
    # Its iteration runs in bfloat16 (8 bits): a last bit of the input moves an element of the update by 2^-8 of it.
    check(ranks, [(Case("matrices of torch", make=hidden_matrices), hidden_matrices)], (0, 3), rtol=1e-3)


def test_fp32_and_small_groups_of_units(ranks: Any) -> None:
    zero = {"sub_group_size": 50, "reduce_bucket_size": 100}
    pairs = [
        (Case("lamb fp32", "Lamb", {**LAMB, "eps": 1e-3}, dtype=torch.float32), book(textbook.lamb, **LAMB, eps=1e-3)),
        (Case("lamb cut", "Lamb", LAMB, zero=zero), book(textbook.lamb, **LAMB)),
        (Case("muon cut", "Muon", {"muon_lr": 0.02, "adam_lr": 0.01}, zero=zero), muon_by_the_book),
        (Case("adafactor cut", "Adafactor", {"lr": 0.05}, zero=zero), partial(torch.optim.Adafactor, lr=0.05)),
    ]
    check(ranks, pairs[:1], (3,), rtol=1e-5)
    check(ranks, pairs[1:], (2,))


def test_ranks_that_hold_nothing_of_some_parameters(ranks: Any) -> None:
    adafactor = (Case("adafactor", "Adafactor", {"lr": 0.05}), partial(torch.optim.Adafactor, lr=0.05))
    check(ranks, [OURS[0], OURS[8], adafactor], (3,), size=4)


def test_resuming_is_exact(ranks: Any) -> None:
    cases = [
        Case("lamb", "Lamb", LAMB),
        Case("lion", "Lion", {"lr": 0.003}),
        Case("adam", "Adam", {"bias_correction": False}),
        Case("muon", "Muon", {"lr": 0.02}),
        Case("adafactor", "Adafactor", {"lr": 0.05}),
    ]
    both = [(case, stage) for case in cases for stage in (1, 3)]
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}}
    for name, top in (("bf16", {"bf16": {"enabled": True}}), ("fp16", fp16)):
        both += [(Case(name, "AdamW", {"lr": 0.01}, dtype=torch.float32, top=top), stage) for stage in STAGES]
        both += [(Case(name, "Adafactor", {"lr": 0.01}, dtype=torch.float32, top=top), 3)]
    both += [(Case("fp32", "AdamW", {"lr": 0.01}, dtype=torch.float32), stage) for stage in (0, 2)]
    assert ranks(2).run(interrupted, both, 5) == [[True] * len(both)] * 2


def test_a_class_of_which_nothing_is_known_must_be_allowed(ranks: Any) -> None:
    match = "not known whether the optimizer Normed steps each parameter.*zero_allow_untested_optimizer"
    ranks(2).run_expecting(ConfigError, train, [(Case("unknown", make=Normed), 1)], 0, match=match)


def test_muon_says_what_it_steps(caplog: pytest.LogCaptureFixture) -> None:
    from shardwise.optim import build_optimizer
    from tests.optim.test_optimizers import Section

    model = Net()
    model.branch.sometimes.weight.use_muon = False
    with caplog.at_level("INFO", "shardwise"):
        optimizer = build_optimizer(Section("Muon", {"lr": 0.1}), model.parameters(), model)
    assert isinstance(optimizer, Muon)
    text = caplog.text
    assert "Muon steps 3 parameters: branch.wide.weight, branch.tall.weight, unused.weight" in text
    assert "AdamW steps" in text and "embed.weight" in text and "sometimes.weight" in text and "head.weight" in text
