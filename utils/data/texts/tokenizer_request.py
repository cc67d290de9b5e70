"""Which tokenizer encodes a data set: one to be trained, a published one, or that of weights."""

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers

from ...errors import UserError
from .basic_english import BASIC_ENGLISH, load_vocabulary, train_basic_english
from .files import file_sum
from .sources import TOKENIZERS
from .tokenizer import (
    load_tokenizer,
    stopwords_pattern,
    tokenizer_from_json,
    train_tokenizer,
    unsuited_to_wordpiece,
)

AUTO = "auto"


@dataclass(frozen=True)
class TokenizerRequest:
    """How the tokenizer of a data set is made or found.

    Args:
        name: one of TOKENIZERS, to be trained, or "auto": wordpiece, or bpe_unicode for training
            texts that wordpiece does not suit; "basic_english", whose vocabulary is counted, or
            read from `vocab`; or the path of a tokenizer.json, or of a folder that holds one.
        vocab_size: of a tokenizer that is trained or counted; None: no limit (basic_english only).
        lowercase: for a tokenizer that is trained.
        json: content of a tokenizer.json, which replaces all of these: the tokenizer that weights
            were trained with.
        min_freq, vocab: for basic_english (basic_english.py).
        stopwords: leave out English stop words, before anything else.
    """

    name: str = "wordpiece"
    vocab_size: int | None = 8000
    lowercase: bool = True
    json: str | None = None
    min_freq: int = 1
    vocab: Path | None = None
    stopwords: bool = False

    def identity(self) -> list | str:
        """What decides how texts are encoded: part of a cache's key.

        Raises:
            UserError: `name` is neither a kind of tokenizer nor a file that can be read.
        """
        if self.json is not None:
            return ["json", hashlib.sha256(self.json.encode()).hexdigest()]
        if self.stopwords:
            return [replace(self, stopwords=False).identity(), stopwords_pattern()]
        if self.name == BASIC_ENGLISH:
            if self.vocab is not None:
                return [self.name, file_sum(self.vocab)]
            return [self.name, self.vocab_size, self.min_freq]
        file = self._file()
        return [self.name, self.vocab_size, self.lowercase] if file is None else file_sum(file)

    def make(self, texts: Sequence[str], say: Callable = print) -> Tokenizer:
        """The tokenizer, trained on `texts` if it is to be trained. `say` is given a line if
        wordpiece does not suit them.

        Raises:
            UserError: the vocabulary is too small, or the file is not a tokenizer or vocabulary.
        """
        if self.json is not None:
            return tokenizer_from_json(self.json)
        if self.stopwords:
            pattern = Regex(stopwords_pattern())
            remove = normalizers.Sequence([normalizers.Replace(pattern, ""), normalizers.Strip()])
            kept = [remove.normalize_str(text) for text in texts]
            tokenizer = replace(self, stopwords=False).make(kept, say)
            further = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
            tokenizer.normalizer = normalizers.Sequence([remove, *further])
            return tokenizer
        if self.name == BASIC_ENGLISH:
            if self.vocab is not None:
                return load_vocabulary(self.vocab)
            return train_basic_english(texts, min_freq=self.min_freq, vocab_size=self.vocab_size)
        file = self._file()
        if file is not None:
            return load_tokenizer(file)
        kind = "wordpiece" if self.name == AUTO else self.name
        if kind == "wordpiece" and (
            why := unsuited_to_wordpiece(texts, self.vocab_size, self.lowercase)
        ):
            kind = "bpe_unicode" if self.name == AUTO else kind
            what = "is taken" if self.name == AUTO else "suits these texts better"
            say(f"note: --tokenizer bpe_unicode {what}: {why}")
        print(f"training a {kind} tokenizer on {len(texts):,} texts, once", file=sys.stderr)
        return train_tokenizer(
            texts, kind=kind, vocab_size=self.vocab_size, lowercase=self.lowercase
        )

    def _file(self) -> Path | None:
        """The file that `name` is the path of; None if it is a kind. UserError if it is neither."""
        if self.name in (AUTO, *TOKENIZERS):
            return None
        path = Path(self.name)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            if re.fullmatch(r"(?:[\w.-]+/)?[\w.]+-[\w.-]+", self.name):
                raise UserError(
                    f"{path} is not there, and the Hugging Face hub is not asked: download "
                    f"https://huggingface.co/{path}/resolve/main/tokenizer.json, and give its path"
                )
            raise UserError(
                f"{path} is not there: --tokenizer takes {AUTO}, {', '.join(TOKENIZERS)}, "
                "basic_english, or the path of a tokenizer.json"
            )
        return path
