"""Arguments: folder of the data, epochs, seed, folder of the result."""

import sys
from pathlib import Path

import pandas
import samples
from fastai.losses import CrossEntropyLossFlat
from fastai.text.all import (
    AWD_LSTM,
    TextDataLoaders,
    awd_lstm_clas_config,
    text_classifier_learner,
)
from fastai.torch_core import set_seed
from fastai.vision.all import (
    CategoryBlock,
    DataBlock,
    ImageBlock,
    Learner,
    Normalize,
    RandomSplitter,
    Resize,
    aug_transforms,
    get_image_files,
    imagenet_stats,
    parent_label,
    xresnet18,
)
from torch.cuda import is_available

folder, epochs, seed, output = Path(sys.argv[1]), *map(int, sys.argv[2:4]), Path(sys.argv[4])
set_seed(seed)

if samples.is_texts(folder):
    # https://docs.fast.ai/tutorial.text.html: AWD_LSTM, drop_mult=0.5, rate 1e-2.
    train, test = (
        pandas.DataFrame(dict(zip(("text", "class"), samples.texts(file), strict=True)))
        for file in (folder / "train.csv", folder / "test.csv")
    )
    dls = TextDataLoaders.from_df(train, text_col="text", label_col="class", valid_pct=0)
    # Its three layers of 1,152 would take an hour for an epoch of 15,000 texts on two cores.
    config = awd_lstm_clas_config | {"emb_sz": 128, "n_hid": 256, "n_layers": 2}
    learn = text_classifier_learner(dls, AWD_LSTM, config=config, drop_mult=0.5, pretrained=False)
    rate, tests, labels = 1e-2, test, list(test["class"])
else:
    # "Training a State-of-the-Art Model" in fastai's book, chapter 7: xresnet from nothing,
    # Normalize, aug_transforms with min_scale=0.75, one cycle, rate 3e-3. Its pictures have 224
    # pixels, for xresnet50.
    norm = Normalize.from_stats(*imagenet_stats)
    block = DataBlock(
        (ImageBlock, CategoryBlock), get_items=get_image_files, get_y=parent_label,
        splitter=RandomSplitter(0), item_tfms=Resize(32),
        batch_tfms=[*aug_transforms(size=32, min_scale=0.75), norm],
    )  # fmt: skip
    dls = block.dataloaders(folder / "train")
    learn = Learner(dls, xresnet18(n_out=dls.c), loss_func=CrossEntropyLossFlat())
    rate = 3e-3
    tests, labels = samples.pictures(folder / "test")

if is_available():
    learn = learn.to_fp16()
learn.fit_one_cycle(epochs, rate)
_, _, found = learn.get_preds(dl=dls.test_dl(tests), with_decoded=True)
classes = dls.vocab[1] if samples.is_texts(folder) else dls.vocab
samples.write(output, labels, [classes[index] for index in found])
