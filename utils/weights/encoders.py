"""Encoders of texts by others, from the Hugging Face hub, its cache, or a folder: their weights,
and what a model like them is built by. Their code is never executed, nor are pickles read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..data.texts.tokenizer import end_id, pad_id, tokenizer_from_json, unknown_id
from ..errors import UserError, one_line
from ..machine.packages import is_installed, require
from ..machine.silence import silenced
from .card import TextCard
from .files import read_safetensors
from .published import fetch_folder, is_on_hub

# Small ones that others have trained on sentences: of English, and of fifty languages.
USUAL = {
    True: "sentence-transformers/all-MiniLM-L6-v2",
    False: "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2",
}
STATIC = "model2vec"  # a table of embeddings, without layers
_PARTS = ("*.json", "*.txt", "*.model", "*.safetensors")  # of a repository on the hub
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@dataclass(frozen=True)
class EncoderFiles:
    """An encoder in a folder.

    Attributes:
        name: as the user calls it.
        folder: with config.json and model.safetensors.
        config: of the library, from config.json.
        pooling: "cls" or "mean": how its output becomes that of a text.
        tokenizer: JSON of the `tokenizers` library.
    """

    name: str
    folder: Path
    config: dict
    pooling: str
    tokenizer: str

    @property
    def card(self) -> dict:
        """What a classifier's card keeps of it."""
        return {"source": self.source, "config": self.config, "pooling": self.pooling}

    @property
    def source(self) -> str:
        """Its name, with the revision if it is from the hub."""
        from_hub = self.folder.parent.name == "snapshots"
        return f"{self.name}@{self.folder.name}" if from_hub else self.name

    def weights(self) -> dict[str, Tensor]:
        """By their names in `Encoder`."""
        if self.config["model_type"] == STATIC:
            tensors = read_safetensors(self.folder / "model.safetensors")[0]
            return {f"backbone.{name}": tensor for name, tensor in tensors.items()}
        from transformers import AutoModel

        flag = f"--model {self.name}"
        try:
            with silenced():
                model, found = AutoModel.from_pretrained(
                    self.folder, use_safetensors=True, trust_remote_code=False,
                    local_files_only=True, output_loading_info=True,
                )  # fmt: skip
        except Exception as error:  # of reading, or of what the library does not know
            raise UserError(f"{flag}: its weights cannot be read: {one_line(error, 300)}") from None
        tensors = model.float().state_dict()
        own = {name: t for name, t in tensors.items() if not name.startswith("pooler.")}
        if missing := sorted({*found["missing_keys"]} & own.keys()):
            raise UserError(
                f"{flag}: {len(missing)} of its weights are not in {self.folder}, such as "
                f"{missing[0]}: give a folder with a whole encoder"
            )
        return {f"backbone.{name}": tensor for name, tensor in own.items()}


def read_encoder(name: str, say: Callable = print) -> EncoderFiles:
    """The encoder `name`: a folder, or a name on the hub, as owner/name or owner/name@revision.

    Args:
        say: is given a line before a download.

    Raises:
        UserError: it is not there, or its model does not read texts as a classifier needs it.
    """
    flag = f"--model {name}"
    folder = Path(name)
    if not folder.is_dir():
        folder = fetch_folder(name, flag, _PARTS, say)
    if not (folder / "config.json").is_file():
        raise UserError(f"{flag}: {folder} has no config.json, so it is no encoder of transformers")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{flag}: {folder} has no model.safetensors, and pickles are not read: transformers "
            "writes one beside it by AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    config = _read_json(folder / "config.json")
    if config.get("model_type") == STATIC:
        tensors = read_safetensors(folder / "model.safetensors")[0]
        config["shapes"] = {name: [*tensor.shape] for name, tensor in tensors.items()}
        return EncoderFiles(name, folder, config, "mean", _static_tokenizer(folder, flag))
    require(flag, "transformers")
    from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer

    architecture = (config.get("architectures") or [""])[0]
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"{flag}: it needs code of its own, which is not executed; take another")
    with silenced():
        try:
            known = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise UserError(f"{flag}: {one_line(error, 200)}") from None
    decodes = any(getattr(known, name, False) for name in ("is_encoder_decoder", "is_decoder"))
    if decodes or architecture.endswith("ForCausalLM"):
        raise UserError(
            f"{flag}: {architecture or config['model_type']} writes texts; take an encoder, such "
            "as sentence-transformers/all-MiniLM-L6-v2"
        )
    if getattr(known, "hidden_size", None) is None:
        raise UserError(f"{flag}: {config.get('model_type')} is no encoder of texts alone")
    if architecture.endswith(_HEADS[0]) and known.num_labels == 1:
        raise UserError(f"{flag} gives a single score, as rerankers do; take the encoder itself")
    if architecture.endswith(_HEADS):
        say(f"note: {flag} has a head of its own, which is left out")
    with silenced():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            tokenizer_json = tokenizer.backend_tokenizer.to_str()
            end_id(tokenizer_from_json(tokenizer_json))
        except Exception as error:
            raise UserError(
                f"{flag}: its tokenizer cannot be used: {one_line(error, 200)}"
            ) from None
    plain = json.loads(known.to_json_string())
    return EncoderFiles(name, folder, plain, _pooling(folder, config), tokenizer_json)


def find_encoder(english: bool) -> str | None:
    """The name of a small encoder that can be had: from the hub's cache, or from the hub."""
    can = is_installed("transformers") and is_on_hub(USUAL[english])
    return USUAL[english] if can else None


def build_encoder(
    card: TextCard, *, dropout: float, attention_dropout: float, lora: int | None
) -> nn.Module:
    """The classifier for the tokens and classes of `card`, which has an encoder, with random
    weights.

    Args:
        dropout: rate on the classifier's input; inside, the encoder's own rates hold.
        attention_dropout: rate on attention weights.
        lora: rank of adapters, which are trained in place of the encoder; None: there are none.
    """
    from ..models.encoder import Encoder, StaticEmbeddings, StaticEncoder, add_adapters

    assert card.encoder is not None
    tokenizer = tokenizer_from_json(card.tokenizer)
    config, classes = dict(card.encoder["config"]), len(card.classes)
    if config["model_type"] == STATIC:
        table = StaticEmbeddings(**config["shapes"], normalize=config.get("normalize", True))
        return StaticEncoder(table, classes, dropout, pad_id(tokenizer), unknown_id(card.tokenizer))
    require("--model", "transformers")
    from transformers import AutoConfig, AutoModel

    for name in ("attention_probs_dropout_prob", "attention_dropout"):
        if name in config or hasattr(AutoConfig.for_model(config["model_type"]), name):
            config[name] = attention_dropout
    with silenced():
        backbone = AutoModel.from_config(AutoConfig.for_model(**config)).float()
    model = Encoder(
        backbone, classes, max_len=card.max_len, pooling=card.pooling or "mean",
        dropout=dropout, pad=pad_id(tokenizer), end=end_id(tokenizer),
    )  # fmt: skip
    most = getattr(backbone.config, "max_position_embeddings", None)
    if most and card.max_len > (
        reads := most - (model.end is not None) - (model.first_position or 0)
    ):
        raise UserError(f"--max_len {card.max_len}: this encoder reads at most {reads} tokens")
    if lora is not None:
        require("--lora", "peft")
        add_adapters(model, lora)
    return model


def _pooling(folder: Path, config: dict) -> str:
    """As the sentence transformer or the model says; else the mean."""
    file = folder / "1_Pooling" / "config.json"
    if file.is_file():
        says = _read_json(file)
        cls = says.get("pooling_mode_cls_token") or says.get("pooling_mode") == "cls"
        return "cls" if cls else "mean"
    return config.get("classifier_pooling", "mean")


def _static_tokenizer(folder: Path, flag: str) -> str:
    try:
        return (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{flag}: {folder / 'tokenizer.json'} is missing or damaged") from None


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: download it again")
    return content
