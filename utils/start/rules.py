"""What follows from the data and the machine: the flags of an entry, each with its reason.

Provisional, until ten-minute recipes have been studied: from recipes/cifar10_cpu.yaml and
recipes/ag_news_cpu.yaml, which have (benchmarks/results/recipes.md).
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from ..weights.encoders import find_encoder
from .facts import SMALL, Facts

# Tokens that a small encoder (22 M parameters) learns from in a second, on a core of a CPU without
# arithmetic in half precision, and on a GPU; and how much faster it reads them.
CORE, GPU, READS = 1500, 100_000, 3.3
TOKENS = 1.4  # of a word
FEW = 8000  # texts


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        seconds: that the run may take; None: as many as it needs.
    """

    gpu: bool
    cores: int = 1
    seconds: float | None = None

    @classmethod
    def here(cls, device: str, seconds: float | None = None) -> "Machine":
        """This one, where --device is `device`."""
        import torch

        return cls(device != "cpu" and torch.cuda.is_available(), torch.get_num_threads(), seconds)

    def finishes(self, facts: Facts, epochs: float, share: float) -> bool:
        """Whether a small encoder learns for so many epochs, and reads the test set, in a share of
        the time."""
        words = facts.train * epochs + facts.test / READS
        seconds = words * facts.size * TOKENS / (GPU if self.gpu else CORE * self.cores)
        return self.seconds is None or seconds < share * self.seconds


@dataclass(frozen=True)
class Rule:
    """
    Attributes:
        flags: of the entry, with their values.
        why: the reason.
        when: (facts, machine) -> whether it holds.
        but: settings of the user that leave it without effect, besides its own.
    """

    flags: dict[str, object]
    why: str
    when: Callable[[Facts, Machine], bool] = lambda facts, machine: True
    but: tuple[str, ...] = ()


def _by_samples(
    sizes: dict[int, dict],
    why: str,
    also: Callable[[Facts, Machine], bool] = lambda facts, machine: True,
    **further,
) -> tuple[Rule, ...]:
    """A rule for up to each number of training samples; the last is for all above. They hold if
    `also` does."""
    rules, low = [], 0

    def within(low: int, most: int) -> Callable[[Facts, Machine], bool]:
        return lambda facts, machine: low < facts.train <= most and also(facts, machine)

    for most, flags in sizes.items():
        rules.append(Rule(flags, why, within(low, most), **further))
        low = most
    return tuple(rules)


def _has_time(facts: Facts, machine: Machine) -> bool:
    """To train a whole encoder."""
    return machine.finishes(facts, 1, 0.7)


ALL = 1 << 62
OPTIMIZER = ("optimizer", "ngd", "lr")
WAYS = ("freeze_backbone", "lora", "max_steps")  # of training an encoder, or how long
# Settings of the user that say another model or tokenizer than an encoder's.
OF_OTHERS = {
    *("model", "pretrained", "layers", "dim", "heads", "ffn", "token_dropout", "mixup_at"),
    *("tokenizer", "vocab_size", "lowercase", "no_lowercase", "min_freq", "vocab", "stopwords"),
}
# Those below win over those above.
RULES = {
    "pictures": (
        Rule({"depth": 18}, "a small network sees all pictures more often", but=("model",)),
        Rule(
            {"width": 16}, "on a CPU a narrow one learns most in minutes",
            lambda facts, machine: not machine.gpu, ("model", "pretrained"),
        ),
        Rule(
            {"zero_init_residual": False}, "a narrow network learns sooner so",
            lambda facts, machine: not machine.gpu, ("model", "pretrained", "width"),
        ),
        Rule(
            {"image_size": SMALL}, "on a CPU larger pictures take minutes for each epoch",
            lambda facts, machine: facts.size > SMALL and not machine.gpu, ("pretrained",),
        ),
        Rule(
            {"optimizer": "muon", "weight_decay": 0.15, "sched": "cosine"},
            "more accurate than SGD in as many epochs", but=OPTIMIZER,
        ),
        Rule(
            {"label_smoothing": 0.1}, "a little more accurate, and less sure of mistakes",
            but=("loss",),
        ),
        *_by_samples(
            {
                1000: {"batch_size": 16, "lr": 0.006},
                4000: {"batch_size": 32, "lr": 0.008},
                20000: {"batch_size": 64, "lr": 0.012},
                ALL: {"batch_size": 128, "lr": 0.017},
            },
            "few samples need small batches, for enough steps", but=OPTIMIZER,
        ),
    ),
    "texts": (
        Rule(
            {"layers": 1, "dim": 256, "heads": 4, "ffn": 512, "pooling": "mean"},
            "more layers gain little without texts by the hundred thousand",
            but=("layers", "dim", "pretrained"),
        ),
        Rule(
            {"dropout": 0.4, "token_dropout": 0.6}, "so few texts are learned by heart without it",
            lambda facts, machine: facts.train <= 50_000,
        ),
        Rule(
            {"optimizer": "muon", "lr": 0.002, "sched": "cosine", "label_smoothing": 0.1},
            "more accurate than AdamW in as many epochs", but=OPTIMIZER,
        ),
        *_by_samples(
            {1000: {"batch_size": 16}, 8000: {"batch_size": 32}, ALL: {"batch_size": 64}},
            "few samples need small batches, for enough steps",
        ),
    ),
    "encoders": (
        Rule({"pretrained": "published"}, "its weights are what it is taken for"),
        Rule({"max_len": 128}, "the beginning of a text says enough for its class"),
        *_by_samples(
            {1000: {"epochs": 10}, FEW: {"epochs": 5}, ALL: {"epochs": 3}},
            "all of it is trained; more epochs change little", _has_time, but=WAYS,
        ),
        Rule({"lr": 1e-4}, "for small encoders", _has_time, (*OPTIMIZER, *WAYS)),
        Rule(
            {"freeze_backbone": True},
            "there is no time to train more than the head",
            lambda facts, machine: not _has_time(facts, machine), ("lora",),
        ),
    ),
}  # fmt: skip


def chosen(
    kind: str, facts: Facts, machine: Machine, given: Collection[str]
) -> Iterator[tuple[dict[str, object], str]]:
    """(flags, reason) of the rules that hold; `given` are the settings that the user gives."""
    for rule in RULES[kind]:
        own = {name: value for name, value in rule.flags.items() if name not in given}
        if own and rule.when(facts, machine) and not {*rule.but} & {*given}:
            yield own, rule.why


def encoder_for(
    facts: Facts, machine: Machine, given: Collection[str]
) -> Iterator[tuple[dict[str, object], str]]:
    """The rule that takes an encoder, if one can be had, and there is time to train it, or, for its
    head alone, to read all texts; of many texts a Transformer learns as much from nothing."""
    reads = facts.train <= FEW and machine.finishes(facts, 1 / READS, 0.5)
    if OF_OTHERS & {*given} or not (reads or _has_time(facts, machine)):
        return
    if (name := find_encoder(facts.english)) is not None:
        why = "it has read before, and needs fewer texts"
        yield {"model": name}, why
