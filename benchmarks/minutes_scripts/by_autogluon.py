"""Arguments: folder of the data, time limit of the training in seconds, seed, folder of the result.

With the default preset, whose features of a text are its n-grams. Those for a higher quality train
each model several times (auto_stack), for which minutes are short.
"""

import sys
from pathlib import Path

import pandas
import samples
from autogluon.tabular import TabularPredictor

folder, seconds, seed, output = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def table(split: str) -> pandas.DataFrame:
    texts, labels = samples.texts(folder / f"{split}.csv")
    return pandas.DataFrame({"text": texts, "class": labels})


test = table("test")
predictor = TabularPredictor("class", path=f"{output}/models", eval_metric="accuracy")
predictor.fit(table("train").sample(frac=1, random_state=seed), time_limit=seconds)
samples.write(Path(output), test["class"], predictor.predict(test.drop(columns="class")))
