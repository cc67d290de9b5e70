"""Arguments: folder of the data, epochs, seed, folder of the result, "bf16" or "fp32"."""

import sys
from pathlib import Path

import samples
from datasets import Dataset, load_dataset
from tokenizers import BertWordPieceTokenizer
from torch.cuda import is_available
from torchvision.transforms import (
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToTensor,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    DefaultDataCollator,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

folder, epochs, seed, output = Path(sys.argv[1]), *map(int, sys.argv[2:4]), Path(sys.argv[4])
set_seed(seed)


def of_texts():
    """The smallest of the "BERT miniatures" (google/bert_uncased_L-2_H-128_A-2), with the batch
    size and the largest of the rates that their page names, and a vocabulary of these texts."""
    train, test = (samples.texts(folder / f"{split}.csv") for split in ("train", "test"))
    words = BertWordPieceTokenizer()
    words.train_from_iterator(train[0], vocab_size=20_000, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=words._tokenizer, model_max_length=128)
    classes = sorted(set(train[1]))
    parts = [
        Dataset.from_dict({"text": texts, "label": [classes.index(label) for label in labels]})
        .map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
        for texts, labels in (train, test)
    ]  # fmt: skip
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=512, num_labels=len(classes),
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    return model, parts, classes, DataCollatorWithPadding(tokenizer), {"learning_rate": 3e-4}


def of_pictures():
    """ResNet-18 (the configuration of microsoft/resnet-18) and the augmentation of the guide
    "Image classification" and of run_image_classification.py. The rates there are for fine-tuning;
    1e-3 is AdamW's usual one from nothing."""
    found = load_dataset("imagefolder", data_dir=str(folder))
    classes = found["train"].features["label"].names
    crops = {"train": [RandomResizedCrop(32), RandomHorizontalFlip()], "test": []}

    def with_tensors(split: str):
        steps = Compose([*crops[split], ToTensor(), Normalize([0.5] * 3, [0.5] * 3)])

        def tensors(rows):
            pictures = [steps(picture.convert("RGB")) for picture in rows["image"]]
            return {"pixel_values": pictures, "label": rows["label"]}

        return found[split].with_transform(tensors)

    config = ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512],
        num_labels=len(classes),
    )  # fmt: skip
    parts = [with_tensors("train"), with_tensors("test")]
    own = {"learning_rate": 1e-3, "remove_unused_columns": False, "dataloader_num_workers": 2}
    return ResNetForImageClassification(config), parts, classes, DefaultDataCollator(), own


model, (train, test), classes, collator, own = (
    of_texts if samples.is_texts(folder) else of_pictures
)()
arguments = TrainingArguments(
    output_dir=str(output / "trainer"), num_train_epochs=epochs, seed=seed, save_strategy="no",
    report_to="none", per_device_train_batch_size=64, per_device_eval_batch_size=256,
    warmup_steps=0.1, bf16=sys.argv[5] == "bf16", use_cpu=not is_available(), **own,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=train, data_collator=collator)
trainer.train()
found = trainer.predict(test)
true, predicted = found.label_ids, found.predictions.argmax(1)
samples.write(output, *([classes[index] for index in part] for part in (true, predicted)))
