"""What follows from the data and the machine: the flags of an entry, each with its reason.

How they were found: benchmarks/results/recipes.md; those for GPUs are not measured.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from ..weights.encoders import find_encoder
from ..weights.published import is_on_hub
from .facts import SMALL, Facts

# Tokens that a small encoder (22 M parameters) learns from in a second, on a core of a CPU without
# arithmetic in half precision, and on a GPU; and how much faster it reads them.
CORE, GPU, READS = 1500, 100_000, 3.3
TOKENS = 1.4  # of a word
FEW = 8000  # texts
# A network of timm for the features of pictures, and the side of these in pixels; of up to how many
# small pictures a network of their own learns less.
NETWORK, SIDE, FEW_SMALL = "efficientnet_lite0.ra_in1k", 128, 2000


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        seconds: that the run may take; None: as many as it needs.
        speed: of training on pictures, relative to the CPU where these rules were found.
    """

    gpu: bool
    cores: int = 1
    seconds: float | None = None
    speed: float = 1

    @classmethod
    def here(cls, device: str, seconds: float | None = None, precision: str = "") -> "Machine":
        """This one, where --device is `device` and --precision is `precision`."""
        import torch

        from ..machine.backends import is_faster_in_bf16

        gpu = device != "cpu" and torch.cuda.is_available()
        is_faster = precision != "fp32" and is_faster_in_bf16(torch.device("cpu"))
        # The CPU with AMX that was measured trains no faster than the one of the rules.
        speed = 2 if is_faster and not torch.cpu._is_amx_tile_supported() else 1
        return cls(gpu, torch.get_num_threads(), seconds, speed)

    def finishes(self, facts: Facts, epochs: float, share: float) -> bool:
        """Whether a small encoder learns for so many epochs, and reads the test set, in a share of
        the time."""
        words = facts.train * epochs + facts.test / READS
        seconds = words * facts.size * TOKENS / (GPU if self.gpu else CORE * self.cores)
        return self.seconds is None or seconds < share * self.seconds

    def reads(self, facts: Facts) -> bool:
        """Whether NETWORK reads all pictures in half of the time."""
        if self.seconds is None:
            return True
        return (facts.train + facts.test) / _pictures_a_second(self.gpu) < 0.5 * self.seconds

    def pace(self, facts: Facts) -> float:
        """Seconds for each training picture, as if of 32 pixels a side, on a core of that CPU."""
        if self.seconds is None:
            return float("inf")
        pixels = (min(facts.size, SMALL) / 32) ** 2
        return self.seconds * self.cores * self.speed / facts.train / pixels


def _pictures_a_second(gpu: bool) -> float:
    """That NETWORK reads here and now; tried with random weights."""
    import timm
    import torch

    device = "cuda" if gpu else "cpu"
    network = timm.create_model(NETWORK).eval().to(device, memory_format=torch.channels_last)
    pictures = torch.zeros(64, 3, SIDE, SIDE, device=device).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        network(pictures).sum().item()  # slower than those after it
        started = time.perf_counter()
        network(pictures).sum().item()
    return len(pictures) / (time.perf_counter() - started)


@dataclass(frozen=True)
class Rule:
    """
    Attributes:
        flags: of the entry, with their values, or functions (facts, machine) that give them.
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


# Of the small network on a CPU: wider and in larger batches, the more of the time each picture has.
# With PLENTY a ResNet learns more.
LITTLE, MUCH, PLENTY = 0.006, 0.02, 0.1  # `Machine.pace`


def _width(facts: Facts, machine: Machine) -> int:
    pace = machine.pace(facts)
    return 24 if pace < LITTLE else 48 if pace >= MUCH and facts.train > 20000 else 32


def _batch(facts: Facts, machine: Machine) -> int:
    if facts.train <= 20000:
        return 32 if facts.train <= 1000 else 128
    pace = machine.pace(facts)
    return 125 if pace < LITTLE else 250 if pace < MUCH else 500


ALL = 1 << 62
OPTIMIZER = ("optimizer", "ngd", "lr")
PRECISION = ("engine", "amp", "bf16", "fp16")
WAYS = ("freeze_backbone", "lora", "max_steps")  # of training an encoder, or how long
# Settings of the user that say another model or tokenizer than an encoder's.
OF_OTHERS = {
    *("model", "pretrained", "layers", "dim", "heads", "ffn", "token_dropout", "mixup_at"),
    *("tokenizer", "vocab_size", "lowercase", "no_lowercase", "min_freq", "vocab", "stopwords"),
}
BEFORE = {  # why a published model is taken
    "pictures": "it has seen others, and needs fewer of yours",
    "texts": "it has read before, and needs fewer texts",
}
# Settings of the user that say which network.
OF_NETWORKS = {"model", "depth", "width", "stem", "zero_init_residual", "freeze_backbone"}
_SMALL_PICTURES = Rule(
    {"image_size": SMALL}, "on a CPU larger pictures take minutes for each epoch",
    lambda facts, machine: facts.size > SMALL and not machine.gpu, ("pretrained",),
)  # fmt: skip


def _fine_tuned(lr: float) -> tuple[Rule, ...]:
    """Rules for all of a published network."""
    return (
        Rule(
            {"image_size": SIDE}, "nearer to the pictures that it has seen",
            lambda facts, machine: facts.size <= SMALL, ("pretrained",),
        ),
        Rule(
            {"optimizer": "adamw", "lr": lr, "head_lr": 0.003, "sched": "cosine"},
            "what has been learned changes little", but=OPTIMIZER,
        ),
        Rule({"label_smoothing": 0.1}, "a little more accurate", but=("loss",)),
        *_by_samples(
            {1000: {"epochs": 20}, FEW: {"epochs": 10}, ALL: {"epochs": 5}},
            "more change little", but=("max_steps",),
        ),
        Rule({"batch_size": 32}, "few samples need small batches, for enough steps"),
    )  # fmt: skip


# Those below win over those above.
RULES = {
    "pictures": (
        Rule({"depth": 18}, "a small network sees all pictures more often", but=("model",)),
        _SMALL_PICTURES,
        Rule(
            {"optimizer": "muon", "weight_decay": 0.15, "sched": "cosine"},
            "more accurate than SGD in as many epochs", but=(*OPTIMIZER, "pretrained"),
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
            "few samples need small batches, for enough steps", but=(*OPTIMIZER, "pretrained"),
        ),
    ),
    "pictures on a CPU": (
        Rule({"depth": 8}, "of all it learns most in minutes, from small pictures"),
        Rule({"width": _width}, "as wide as there is time for"),
        _SMALL_PICTURES,
        Rule(
            {
                "optimizer": "muon", "muon_normalize": True, "momentum": 0.6, "lr": 0.02,
                "head_lr": 0.003, "sched": "linear",
            },
            "more accurate than SGD in as many epochs", but=OPTIMIZER,
        ),
        Rule(
            {"label_smoothing": 0.2}, "a little more accurate, and less sure of mistakes",
            but=("loss",),
        ),
        Rule({"precision": "fastest"}, "bf16, if this CPU is faster with it", but=PRECISION),
        Rule({"alternate_flips": True}, "each picture is seen from both sides", but=("hflip",)),
        Rule({"crop_padding": 2}, "they vary just enough", but=("crop",)),
        Rule({"batch_size": _batch}, "for enough steps in the time"),
    ),
    "pretrained": _fine_tuned(2e-4),
    "network": _fine_tuned(5e-4),
    "features": (
        Rule(
            {"freeze_backbone": True, "crop_padding": 0, "hflip": 0},
            "each picture is read once, and its features are kept", but=("alternate_flips",),
        ),
        Rule({"image_size": SIDE}, "larger ones take longer", but=("pretrained",)),
        Rule(
            {"optimizer": "adamw", "lr": 0.001, "weight_decay": 0.5, "sched": "cosine"},
            "for a head alone", but=OPTIMIZER,
        ),
        Rule({"batch_size": 32}, "few samples need small batches, for enough steps"),
        Rule({"epochs": 30}, "more change little", but=("max_steps",)),
    ),
    "texts": (
        Rule(
            {"layers": 1, "dim": 256, "heads": 4, "ffn": 512, "pooling": "mean"},
            "more layers gain little without texts by the hundred thousand",
            but=("layers", "dim", "pretrained"),
        ),
        Rule(
            {"tokenizer": "basic_english"}, "so few texts teach whole words alone",
            lambda facts, machine: facts.train <= 1000 and facts.english,
            ("vocab_size", "min_freq", "vocab", "pretrained"),
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
            {1000: {"batch_size": 16}, FEW: {"batch_size": 32}, ALL: {"batch_size": 64}},
            "few samples need small batches, for enough steps",
        ),
        *_by_samples(
            {1000: {"epochs": 60}, FEW: {"epochs": 12}, ALL: {"epochs": 10}},
            "after more they are known by heart", but=("max_steps",),
        ),
    ),
    "encoders": (
        Rule({"pretrained": "published"}, "its weights are what it is taken for"),
        Rule({"max_len": 128}, "the beginning of a text says enough for its class"),
        *_by_samples(
            {100: {"epochs": 30}, 1000: {"epochs": 10}, FEW: {"epochs": 5}, ALL: {"epochs": 3}},
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
RULES["pictures for long on a CPU"] = (
    *(rule for rule in RULES["pictures"] if "batch_size" not in rule.flags),
    Rule({"width": 32, "random_erasing": 0.5}, "wide and varied enough for many epochs"),
    Rule({"batch_size": 250, "lr": 0.017}, "for enough steps in the time", but=OPTIMIZER),
    Rule({"precision": "fastest"}, "bf16, if this CPU is faster with it", but=PRECISION),
    Rule({"alternate_flips": True}, "each picture is seen from both sides", but=("hflip",)),
)


def chosen(
    kind: str, facts: Facts, machine: Machine, given: Collection[str]
) -> Iterator[tuple[dict[str, object], str]]:
    """(flags, reason) of the rules that hold; `given` are the settings that the user gives."""
    for rule in RULES[kind]:
        own = {name: value for name, value in rule.flags.items() if name not in given}
        if own and rule.when(facts, machine) and not {*rule.but} & {*given}:
            yield {k: v(facts, machine) if callable(v) else v for k, v in own.items()}, rule.why


def kind_of(
    kind: str, facts: Facts, machine: Machine, given: Collection[str], has_model: bool
) -> tuple[str, dict[str, object]]:
    """Which of RULES hold for "pictures" or "texts", and the flag that names a published model,
    where one is taken: it can be had, and there is time for it.

    Args:
        has_model: the user names an encoder.
    """
    if kind == "texts":
        if has_model:
            return "encoders", {}
        # Of many texts a Transformer learns as much from nothing.
        reads = facts.train <= FEW and machine.finishes(facts, 1 / READS, 0.5)
        is_free = not OF_OTHERS & {*given} and (reads or _has_time(facts, machine))
        name = find_encoder(facts.english) if is_free else None
        return (kind, {}) if name is None else ("encoders", {"model": name})
    if "pretrained" in given:
        return "features" if "freeze_backbone" in given else "pretrained", {}
    if OF_NETWORKS - {"width"} & {*given}:
        return kind, {}
    is_free = "width" not in given and (facts.size > SMALL or facts.train <= FEW_SMALL)
    if is_free and is_on_hub(f"timm/{NETWORK}") and machine.reads(facts):
        published: dict[str, object] = {"model": NETWORK, "pretrained": "published"}
        return "network" if machine.gpu else "features", published
    is_long = facts.train > 20000 and PLENTY <= machine.pace(facts) < float("inf")
    return kind if machine.gpu else f"pictures {'for long ' if is_long else ''}on a CPU", {}


def lacking(kind: str, facts: Facts, given: Collection[str]) -> str | None:
    """What would help with so few samples, and is not here."""
    if kind == "texts" and facts.train <= FEW and not OF_OTHERS & {*given}:
        return (
            "with so few texts an encoder that has read before is more accurate, if there is time: "
            "pip install transformers, or name its folder by --model"
        )
    few = facts.size > SMALL or facts.train <= FEW_SMALL
    if kind.endswith("on a CPU") and few and "width" not in given:
        return (
            "with so few or large pictures a network that has seen others is more accurate, if "
            "there is time: with internet access it is fetched, else name its folder by "
            f"--model local-dir:FOLDER --pretrained --freeze_backbone --image_size {SIDE}"
        )
    return None
