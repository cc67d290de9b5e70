"""torchtext's tokenizer `basic_english`, and its vocabulary, as a tokenizer of the `tokenizers`
library.

torchtext.data.get_tokenizer("basic_english") puts a text into lower case, removes ", takes
`<br />`, ; and : for spaces, makes a token of each . , ( ) ! ? and ', and splits at white space
(https://github.com/pytorch/text, torchtext/data/utils.py). Its vocabulary has the tokens of the
training texts by falling frequency, those of equal frequency in the order of their characters.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from ...errors import UserError
from .encodings import BY_ROW
from .files import broken_text, read_text_file
from .tokenizer import CLS, CLS_NAMES, PAD_NAMES, SPECIAL, UNK

BASIC_ENGLISH = "basic_english"
UNK_NAMES = (UNK, "<unk>", "<UNK>")
# A capital sigma at the end of a word becomes another letter than elsewhere. Python's str.lower()
# knows this and the library's Lowercase does not; the rule is that of the Unicode Standard, 3.13.
_CASED = r"[\p{Cased}&&[^\p{Case_Ignorable}]]"
_FINAL_SIGMA = rf"Σ(?<={_CASED}\p{{Case_Ignorable}}*Σ)(?!\p{{Case_Ignorable}}*{_CASED})"


def train_basic_english(
    texts: Sequence[str], *, min_freq: int = 1, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer with the vocabulary that torchtext's build_vocab_from_iterator makes of these
    texts, behind our four special tokens.

    Args:
        min_freq: how often a token must occur.
        vocab_size: the most tokens, special ones included, the rarest left out; None: no limit.
    """
    tokenizer = _tokenizer({name: place for place, name in enumerate(SPECIAL)}, UNK)
    trainer = trainers.WordLevelTrainer(
        vocab_size=2**31 if vocab_size is None else vocab_size,
        min_frequency=min_freq,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _begin_with(tokenizer, CLS)


def load_vocabulary(path: Path) -> Tokenizer:
    """The tokenizer with the vocabulary of a text file, which has a token on each line; the id of
    a token is the number of its line, from 0.

    Special tokens are known by their names ([PAD] or <pad>, [UNK] or <unk>, [CLS] or <cls>, ...).
    Those that the file lacks are added behind its last token.

    Raises:
        UserError: the file cannot be read, has no token, or a line of it is not a token.
    """
    lines = read_text_file(path, BY_ROW)[0].split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    ids: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        token = line.removesuffix("\r")
        problem = broken_text(token)
        if problem is None and token.split() != [token]:
            problem = "has white space" if token.strip() else "is empty"
        if problem is None and token in ids:
            problem = f"repeats the token of line {ids[token] + 1}"
        if problem is not None:
            raise UserError(f"{path}: line {number} {problem}: --vocab takes a token on each line")
        ids[token] = len(ids)
    if not ids:
        raise UserError(f"{path} is empty: --vocab takes a token on each line")
    special = []
    for names in (PAD_NAMES, UNK_NAMES, CLS_NAMES):
        special.append(next((name for name in names if name in ids), names[0]))
        ids.setdefault(special[-1], len(ids))
    _, unknown, start = special
    tokenizer = _tokenizer(ids, unknown)
    tokenizer.add_special_tokens(special)
    return _begin_with(tokenizer, start)


def _tokenizer(ids: dict[str, int], unknown: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(_FINAL_SIGMA), "ς"),
            normalizers.Lowercase(),
            normalizers.Replace('"', ""),
            # White space for Python, but not for the library: the last four.
            normalizers.Replace(Regex("<br />|[;:\x1c-\x1f]"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("[.,()!?']"), behavior="isolated"),
        ]
    )
    return tokenizer


def _begin_with(tokenizer: Tokenizer, start: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.token_to_id(start))]
    )
    return tokenizer
