"""Built-in synthetic texts: news-like reports of four classes, from a small grammar.

They need neither files nor a network, and are the same in every run. Every topic word belongs to
two of the four classes, so that no single word tells the class; two words from different pools do,
and each text has at least two. Some texts also quote a topic word of any class.
"""

import re
from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from .sources import TextData, TextRequest, Texts, TextSource

CLASSES = ["business", "science", "sports", "world"]
TRAIN_PER_CLASS, TEST_PER_CLASS = 1000, 250
VERSION = 1  # of the texts; part of the cache's key
_SEED = 20240301
_STRAY_CLAUSES = 0.15  # fraction of clauses that quote a word from any pool

# The topic words of each pair of classes, in the order of `combinations(range(4), 2)`.
POOLS = [
    # business, science
    "software patent chip browser network drug laser robot battery search engine startup data "
    "laboratory licence semiconductor wireless download",
    # business, sports
    "contract transfer sponsor owner bid ticket club bonus franchise agent salary broadcaster "
    "arena merchandise season negotiator payroll takeover",
    # business, world
    "tariff embargo budget oil export strike union reform debt pipeline currency subsidy minister "
    "trade treasury privatisation corruption bank",
    # science, sports
    "doping injury speed trial helmet altitude stamina surgery muscle sample heart training "
    "footage sensor recovery oxygen fitness knee",
    # science, world
    "missile reactor climate outbreak earthquake vaccine drought mission inspector uranium virus "
    "storm satellite flood radiation shuttle rescue famine",
    # sports, world
    "flag rival campaign victory defeat captain boycott delegation host capital torch veteran "
    "crowd rally stadium ceremony squad security",
]
# What else fills the templates below, separated by bars.
_SLOTS = {
    "who": "officials|a spokesman|experts|analysts|people close to the matter|reporters|"
    "two insiders|the chairman|a witness|critics|supporters|the director|observers|a newspaper",
    "said": "said|confirmed|denied|reported|warned|admitted|hinted|announced|insisted",
    "when": "on Monday|on Tuesday|on Friday|this week|last month|early on Sunday|"
    "late on Thursday|after a long delay|for the second time|ahead of schedule|once again|"
    "before the weekend",
    "verb": "raises questions about|changes|overshadows|follows|delays|threatens|revives|"
    "comes before|depends on|ends|puts pressure on|leads to|has little effect on|improves",
    "how": "new|latest|controversial|surprising|second|largest|planned|failed|early|unexpected|"
    "final|long awaited|disputed|costly|possible|first",
    "filler": "nobody was available for comment|more is expected soon|the details remain unclear|"
    "it is too early to draw conclusions|the story has been corrected|"
    "both sides have agreed to talk|few had seen it coming|a decision is due within days",
}
# {w}: a topic word of the class; {x}: a topic word of any class.
_OPENINGS = [
    "the {how} {w} {verb} the {w}",
    "{w} {verb} {how} {w} {when}",
    "{w} and {w}: {who} {said} a {how} change",
    "{who} {said} {w} {verb} {w}",
]
_CLAUSES = [
    "{who} {said} {when} that the {how} {w} {verb} the {w}",
    "the {w} {verb} what {who} had called a {how} {w}",
    "{filler}",
    "{who} {said} {when} that {filler}",
    "a {how} {w} was at the centre of it, {who} {said}",
]
_STRAY = "unlike the {x} of last year, this one {verb} the {w}"


def open_headlines(name: str, request: TextRequest) -> TextSource:
    """4,000 training and 1,000 test texts, equally many of each class."""
    return TextSource(name, {}, VERSION, "built-in synthetic data", _load)


def _load() -> TextData:
    return TextData(
        classes=list(CLASSES),
        train=write_split(TRAIN_PER_CLASS, np.random.default_rng(_SEED)),
        test=write_split(TEST_PER_CLASS, np.random.default_rng(_SEED + 1)),
        synthetic=True,
    )


def write_split(per_class: int, rng: np.random.Generator) -> Texts:
    """`per_class` texts of every class, in random order."""
    labels = rng.permutation(np.repeat(np.arange(len(CLASSES), dtype=np.int64), per_class))
    draws = _draws(rng)
    return Texts([write(int(label), lambda: next(draws)) for label in labels], labels)


def write(label: int, draw: Callable[[], float]) -> str:
    """One text of 5 to about 60 words; `draw()` gives uniform numbers in [0, 1)."""
    pairs = combinations(range(len(CLASSES)), 2)
    pools = [pool for pool, pair in zip(POOLS, pairs, strict=True) if label in pair]
    last = int(draw() * 3)

    def fill(slot: re.Match) -> str:
        nonlocal last
        if slot[1] == "w":  # never from the same pool twice in a row
            last = (last + 1 + int(draw() * 2)) % 3
            return _pick(pools[last].split(), draw)
        if slot[1] == "x":
            return _pick(_pick(POOLS, draw).split(), draw)
        return _pick(_SLOTS[slot[1]].split("|"), draw)

    templates = [_pick(_OPENINGS, draw)]
    for _ in range(int(draw() ** 2 * 5)):  # 0 to 4 more, mostly few
        templates.append(_STRAY if draw() < _STRAY_CLAUSES else _pick(_CLAUSES, draw))
    sentences = [re.sub(r"{(\w+)}", fill, template) for template in templates]
    return ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences) + "."


def _pick(choices: list[str], draw: Callable[[], float]) -> str:
    return choices[int(draw() * len(choices))]


def _draws(rng: np.random.Generator) -> Iterator[float]:
    """Endless uniform numbers, drawn in blocks: a call of the generator for each would be slow."""
    while True:
        yield from rng.random(1 << 14).tolist()
