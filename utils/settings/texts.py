"""Flags of texts."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..data.texts.sources import MAX_BAD, MAX_TOKENS, TEXT_DATASETS, TOKENIZERS
from ..errors import UserError
from ..machine.packages import require
from ..setting import setting
from .config import Config
from .data import data_flag
from .mixing import overfitting_flag
from .optimization import optimizer_flag

text_flag = partial(setting, group="texts")
# Of the user's own files.
file_flag = partial(data_flag, resume="free", essential=True)
TRAINED = ("auto", *TOKENIZERS)
OWN = "transformer"  # the value of --model that is the Transformer here


@dataclass
class TextFlags(Config):
    encoder: ClassVar[str | None] = None  # by others, that is the model

    dataset: str = data_flag(
        "ag_news",
        "Data set; csv is your own CSV, TSV or JSON Lines files, headlines is synthetic and needs "
        "no files, ag_news is downloaded once, the others are read from --data_dir",
        choices=TEXT_DATASETS,
    )
    train_file: str | None = file_flag(
        None, "File to train on, with --dataset csv: .csv, .tsv, .jsonl, or these with .gz"
    )
    test_file: str | None = file_flag(
        None,
        "File of test texts, like --train_file",
        default_text="a part of the training file, see --test_fraction",
    )
    val_file: str | None = file_flag(None, "File of a validation split, instead of --val_fraction")
    text_columns: str | None = file_flag(
        None,
        "Columns with text, by name or number from 1, to be joined by a space: 'title,body'",
        default_text="found in each file, or asked for",
    )
    label_column: str | None = file_flag(
        None,
        "Column with the class, by name or number from 1",
        default_text="found in each file, or asked for",
    )
    id_columns: str | None = data_flag(
        None,
        "Columns of your tables, by name or number from 1, that evaluated.csv and the predictions "
        "repeat: 'id,author'",
        resume="free",
    )
    header: bool | None = data_flag(
        None, "The first row of the tables names their columns",
        default_text="known by the names, or asked for", resume="free",
    )  # fmt: skip
    test_fraction: float | None = data_flag(
        None,
        "Fraction of --train_file that becomes the test set if there is no --test_file; the "
        "same texts for any --seed",
        above=0,
        below=1,
        essential=True,
    )
    on_bad: str = data_flag(
        "error",
        "What to do with a row that cannot be used: stop with an error, or skip it and count it",
        choices=("error", "skip"), resume="evaluation",
    )  # fmt: skip
    max_bad: float = data_flag(
        MAX_BAD, "Largest fraction of the rows of a file that --on_bad skip leaves out",
        low=0, high=1, resume="free", before=1.0,
    )  # fmt: skip
    clean_text: bool = text_flag(
        True, "Remove markup, links, backslashes and broken entities (#39; quot;) from texts"
    )
    tokenizer: str = text_flag(
        "auto",
        "wordpiece, bpe, bpe_unicode or unigram, to be trained on the training texts; auto, "
        "wordpiece where it suits these, else bpe_unicode; basic_english, that of torchtext; or "
        "the path of a tokenizer.json",
    )
    vocab_size: int | None = text_flag(
        None,
        "Vocabulary size of a trained tokenizer", low=300, high=1_000_000,
        unit="tokens", default_text="30000, and with basic_english all tokens", essential=True,
    )  # fmt: skip
    min_freq: int = text_flag(
        1,
        "How often a token must occur in the training texts to be in the vocabulary of "
        "basic_english",
        low=1,
        essential=True,
    )
    vocab: str | None = text_flag(
        None,
        "Vocabulary of basic_english: a text file with a token on each line",
        default_text="counted in the training texts",
        essential=True,
    )
    lowercase: bool = text_flag(True, "Treat upper and lower case alike", essential=True)
    stopwords: str = text_flag(
        "none",
        "Words that are left out of all texts: english, the stop words of scikit-learn",
        choices=("none", "english"),
        essential=True,
    )
    max_len: int = text_flag(
        256,
        "Tokens of a text that are read, from its beginning", low=2,
        high=MAX_TOKENS, unit="tokens",
    )  # fmt: skip
    batch_tokens: int | None = optimizer_flag(
        None,
        "Batches of about this many tokens, with fewer long or more short texts, instead of "
        "--batch_size texts",
        low=1,
        unit="tokens",
    )
    mixup_at: str = overfitting_flag(
        "sentence",
        "What is mixed: the representation of a text that the classifier reads, or the "
        "embeddings of its tokens",
        choices=("sentence", "embeddings"),
    )

    @property
    def tokenizer_is_trained(self) -> bool:
        if self.encoder is not None:
            return False
        if self.tokenizer == "basic_english":
            return self.vocab is None
        return self.tokenizer in TRAINED

    def ineffective(self):
        yield from super().ineffective()
        of_other_file = self.predict or self.eval_data
        if self.dataset != "csv":
            reason = f"--dataset {self.dataset} has its own texts; the flag is for csv"
            names: tuple[str, ...] = ("train_file", "test_file", "val_file", "test_fraction")
            names += () if self.eval_data else ("label_column", "group_column")
            yield names + (() if of_other_file else ("text_columns", "header")), reason, "dataset"
        else:
            yield "data_dir", "--dataset csv reads --train_file and --test_file", "dataset"
        if self.dataset in ("headlines", "imdb") and not of_other_file:
            yield "id_columns", f"--dataset {self.dataset} has no columns", "dataset"
        if self.dataset == "headlines":
            yield "data_dir", "--dataset headlines is built in and reads no files", "dataset"
            if not of_other_file:
                reason = "--dataset headlines has no bad rows"
                yield ("on_bad", "max_bad", "encoding"), reason, "dataset"
        if self.on_bad == "error" or self.predict:
            yield "max_bad", "it is for --on_bad skip, while training and testing", "on_bad"
        if self.test_file is not None:
            yield "test_fraction", "--test_file is the test set", "test_file"
        if self.val_file is not None:
            yield "val_fraction", "--val_file is the validation split", "val_file"
        if self.encoder is not None:
            names = ("tokenizer", "vocab_size", "lowercase", "min_freq", "vocab", "stopwords")
            yield names, f"--model {self.encoder} brings its own tokenizer", "model"
        if self.tokenizer != "basic_english":
            yield ("min_freq", "vocab"), "it is for --tokenizer basic_english", "tokenizer"
        elif self.vocab is not None:
            yield ("vocab_size", "min_freq"), f"the vocabulary is that of {self.vocab}", "vocab"
        if self.tokenizer == "basic_english":
            yield "lowercase", "basic_english always ignores case", "tokenizer"
        elif not self.tokenizer_is_trained:
            reason = f"the tokenizer of {self.tokenizer} is already trained"
            yield ("vocab_size", "lowercase"), reason, "tokenizer"
        if self.mixup == "none":
            yield "mixup_at", "nothing is mixed without --mixup", "mixup"
        yield "workers", "texts are encoded once, by all cores, and then read from the cache", ""
        if self.batch_tokens is not None and self.action.trains:
            yield "batch_size", "--batch_tokens takes its place", "batch_tokens"

    def validate(self):
        super().validate()
        if self.stopwords != "none" and self.resume is None and self.action.trains:
            require("--stopwords english", "scikit-learn")
        if self.dataset == "csv" and self.train_file is None and self.action.trains:
            raise UserError("--dataset csv needs --train_file, and --test_file or --test_fraction")
        if self.cutmix_alpha:
            raise UserError("--cutmix_alpha pastes boxes of pictures; texts are mixed by --mixup")
        if self.vocab_size is None and self.tokenizer in TRAINED:
            self.vocab_size = 30_000
