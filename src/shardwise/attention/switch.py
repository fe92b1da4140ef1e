"""``flashattention``: finds a model's attention and routes it; all of it can be undone."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from shardwise.attention import hf
from shardwise.attention.backend import (
    FlashAttentionSection,
    Heard,
    Unsuitable,
    dropout_of,
    own_dropout,
    require_own_dropout,
    routed,
)
from shardwise.attention.check import Inputs, Reference, evaluating, has_values, quiet, references, verify
from shardwise.attention.install import has_own_forward, install, original_forward
from shardwise.attention.mha import is_mha, mha_inputs, switch_mha
from shardwise.attention.plain import NOT_FOUND, Plan, plain_inputs, switch_plain
from shardwise.attention.source import Reader
from shardwise.attention.trace import UNTRACEABLE, describe
from shardwise.errors import ConfigError
from shardwise.messages import logger

ALREADY = "calling scaled_dot_product_attention already, flash back-end first now"
HF = "of Hugging Face models"
MHA = "nn.MultiheadAttention"
PLAIN = "written out by hand"
CROSS = "cross-attention; flashattention.cross_attention is false"


@dataclass
class Switched:
    """What was switched.

    Attributes:
        modules: names of the modules that were, by kind.
        left: names of attention modules that were not, with the reason.
        lines: what was said about it.
        largest: the largest difference that the check found, relative to the largest output.
    """

    modules: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    largest: float = 0.0
    _undo: ExitStack = field(default_factory=ExitStack)

    def undo(self) -> None:
        """Take every change away again."""
        self._undo.close()


def switch_attention(model: nn.Module, section: FlashAttentionSection, *, main: bool) -> Switched:
    """Route a model's attention to ``scaled_dot_product_attention``, flash back-end first.

    To be called before the model is sharded, on every rank. Each module that is switched keeps its parameters, its
    hooks and its place; only its ``forward`` is another one, which sets the order of the back-ends itself, so that a
    recomputation of activations has it as well.

    Args:
        model: changed in place.
        section: ``flashattention``.
        main: whether this rank speaks.

    Returns:
        What was switched; ``undo()`` takes it away.

    Raises:
        ConfigError: nothing was found to switch, a switched module gives other outputs than before, or a module has
            no dropout of its own where that is asked for. The model is as it was then.
    """
    switched = Switched()
    if not section.enable:
        return switched
    try:
        _Switch(model, section, switched, main).run()
    except BaseException:
        switched.undo()
        raise
    if main:
        for line in switched.lines:
            logger.info(line)
    return switched


class _Switch:
    """One run over a model."""

    def __init__(self, model: nn.Module, section: FlashAttentionSection, switched: Switched, main: bool) -> None:
        self._model = model
        self._section = section
        self._out = switched
        self._main = main
        self._dropout = dropout_of(section.attention_dropout)
        self._cross = section.cross_attention
        self._done: set[int] = set()
        self._read = Reader()
        self._checked = 0
        self._unchecked: list[str] = []

    def run(self) -> None:
        """Switch what can be, and say so."""
        for name, model in hf.hf_models(self._model):
            self._hf_model(name, model)
        for name, module in self._model.named_modules():
            if id(module) in self._done or not self._is_candidate(module):
                continue
            if self._stays(name, module):
                continue
            if is_mha(module):
                self._mha(name, cast(nn.MultiheadAttention, module))
            else:
                self._own_code(name, module)
        self._conclude()

    def _is_candidate(self, module: nn.Module) -> bool:
        if is_mha(module):
            return True
        if type(module).__module__.startswith("torch."):
            return False
        return self._read.calls_sdpa(module) or self._read.takes_softmax(module)

    def _stays(self, name: str, module: nn.Module) -> bool:
        if has_own_forward(module):
            self._out.left[name] = "its forward has been replaced already"
        elif hf.is_cross_name(name) and not self._cross:
            self._out.left[name] = CROSS
        else:
            return False
        return True

    # ------------------------------------------------------------------------------------------ the four kinds

    def _hf_model(self, prefix: str, model: nn.Module) -> None:
        modules = [(f"{prefix}.{n}".strip("."), m) for n, m in model.named_modules() if self._read.uses_registry(m)]
        self._done.update(id(m) for m in model.modules() if not (is_mha(m) or self._read.looks_like_attention(m)))
        self._done.update(id(m) for _, m in modules)
        change = hf.set_implementation(model)
        self._undo(change.undo)
        if change.refused and not modules:
            self._out.left[prefix or "the model"] = change.refused
        for name, module in modules:
            if has_own_forward(module):
                self._out.left[name] = "its forward has been replaced already"
            elif change.refused:
                self._out.left[name] = change.refused
            elif change.before not in {"eager", "sdpa"}:
                self._refuse_dropout(name, change.before)
                self._out.modules.setdefault(f"{HF}, on {change.before} already and left there", []).append(name)
            else:
                self._hf_module(name, module, change.before)

    def _hf_module(self, name: str, module: nn.Module, before: str) -> None:
        stays = hf.is_cross_name(name) and not self._cross
        if self._section.attention_dropout is True and not stays:
            require_own_dropout(name, own_dropout(module))
        checks = before == "eager" and not stays and has_values(module)
        wanted: list[Reference] = []
        if checks:
            with quiet(module):
                wanted = hf.hf_references(module, name)
        unchecked = checks and not wanted
        self._undo(
            hf.switch_hf(module, name, before=before, dropout=self._dropout, cross=self._cross, unchecked=unchecked)
        )
        if stays:
            self._out.left[name] = CROSS
            return
        self._out.modules.setdefault(ALREADY if before == "sdpa" else HF, []).append(name)
        if checks:
            self._verify(name, module, wanted)

    def _mha(self, name: str, module: nn.MultiheadAttention) -> None:
        wanted: list[Reference] = []
        if has_values(module):
            with quiet(module):
                wanted = references(module, *mha_inputs(module, cross=self._cross))
        self._undo(switch_mha(module, dropout=self._dropout, cross=self._cross, warn=self._warner(name)))
        self._out.modules.setdefault(MHA, []).append(name)
        if has_values(module) and (wanted or self._cross):
            self._verify(name, module, wanted)

    def _own_code(self, name: str, module: nn.Module) -> None:
        """A module with code of the user's: it calls the function already, or has an attention that is known."""
        mentions = self._read.calls_sdpa(module)
        if not self._read.takes_softmax(module):
            self._calls_already(name, module)
            return
        plan = Plan(name, self._dropout, self._cross, self._warner(name), unchecked=has_values(module))
        guess, wanted = _runs_on(module)
        reason = ""
        for inputs in plain_inputs(module) if guess is None else [guess]:
            try:
                call = describe(module, *inputs)
                variant = plan.variant(module, call)
                with evaluating(module):
                    plan.variant(module, describe(module, *inputs))
                if self._section.attention_dropout is True and not variant.drops:
                    require_own_dropout(name, None)
                self._plain(name, module, plan, wanted)
                return
            except Unsuitable as error:
                reason = reason or str(error)
        if mentions and (reason == NOT_FOUND or reason.startswith(UNTRACEABLE)):
            self._calls_already(name, module)
        elif reason != NOT_FOUND and self._read.looks_like_attention(module):
            self._out.left[name] = reason

    def _plain(self, name: str, module: nn.Module, plan: Plan, wanted: list[Reference]) -> None:
        undo = switch_plain(module, plan)
        self._undo(undo)
        try:
            with plan.verifying():
                if has_values(module):
                    self._verify(name, module, wanted)
        except Unsuitable:
            undo()
            raise
        plan.unchecked = plan.unchecked and not wanted
        self._out.modules.setdefault(PLAIN, []).append(name)

    def _calls_already(self, name: str, module: nn.Module) -> None:
        if self._section.attention_dropout is True:
            require_own_dropout(name, own_dropout(module))
        original, dropout = original_forward(module), self._dropout
        warn, heard = self._warner(name), Heard()

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with routed(self.training, dropout):
                if heard.called is not None:
                    return original(self, *args, **kwargs)
                with heard:
                    out = original(self, *args, **kwargs)
            if not heard.called:
                warn("its code has a call of scaled_dot_product_attention, but did not get there")
            return out

        self._undo(install(module, forward))
        self._out.modules.setdefault(ALREADY, []).append(name)

    # ------------------------------------------------------------------------------------------ what is said

    def _verify(self, name: str, module: nn.Module, wanted: list[Reference]) -> None:
        if not wanted:
            self._unchecked.append(name)
            return
        with quiet(module):
            error = verify(name, module, wanted)
        self._out.largest = max(self._out.largest, error or 0.0)
        self._checked += 1

    def _refuse_dropout(self, name: str, implementation: str) -> None:
        if self._section.attention_dropout is not None:
            raise ConfigError(
                f"flashattention.attention_dropout: {name} is on {implementation}, whose dropout cannot be set from "
                "here; set the key to null, or load the model with attn_implementation='sdpa'."
            )

    def _undo(self, undo: Callable[[], None]) -> None:
        self._out._undo.callback(undo)

    def _warner(self, name: str) -> Callable[[str], None]:
        """Says each thing once about a module, on the main rank."""
        said: set[str] = set()
        main = self._main

        def warn(text: str) -> None:
            if text not in said and main:
                logger.warning("flashattention: %s: %s", name or "the model", text)
            said.add(text)

        return warn

    def _conclude(self) -> None:
        out = self._out
        left = [f"{shorten(names)}: {reason}" for reason, names in _by_reason(out.left).items()]
        if not out.modules:
            seen = f" Seen, and left as it is: {'; '.join(left)}." if left else ""
            raise ConfigError(
                "flashattention.enable: found nothing to switch: no Hugging Face attention, no nn.MultiheadAttention, "
                f"no call of scaled_dot_product_attention and no softmax attention that is known.{seen} "
                "Remove the section, or set enable to false."
            )
        for kind, names in out.modules.items():
            out.lines.append(f"flashattention: {len(names)} {kind}: {shorten(names)}")
        if self._section.attention_dropout not in (None, True):
            out.lines.append(f"flashattention: attention dropout is {self._dropout:g} in training, in all of these")
        out.lines += [f"flashattention: left as it is: {text}" for text in left]
        if self._checked:
            out.lines.append(
                f"flashattention: {self._checked} modules give what their own code gives on random input "
                f"(largest difference {out.largest:.0e} of the largest output)"
            )
        if self._unchecked:
            out.lines.append(
                f"flashattention: compared with their own code in the first forward: {shorten(self._unchecked)}"
            )


def shorten(names: list[str]) -> str:
    """Names in one line: those that differ in their numbers only stand once, with ``*``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name), []).append(name)
    parts = [pattern if len(found) > 1 else found[0] for pattern, found in groups.items()]
    more = f" and {len(parts) - 6} more" if len(parts) > 6 else ""
    return ", ".join(part or "the model itself" for part in parts[:6]) + more


def _by_reason(left: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in left.items():
        found.setdefault(reason, []).append(name)
    return found


def _runs_on(module: nn.Module) -> tuple[Inputs | None, list[Reference]]:
    """The first guess of a module's inputs that it runs on, and what it gives; None if there is none."""
    if not has_values(module):
        return None, []
    with quiet(module):
        for inputs in plain_inputs(module):
            if found := references(module, [inputs]):
                return inputs, found
    return None, []
