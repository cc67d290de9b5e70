"""Arguments: folder of the data, unused, seed, folder of the result."""

import sys
from pathlib import Path

import samples
from joblib import Parallel, delayed
from PIL import Image
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

folder, output = Path(sys.argv[1]), Path(sys.argv[4])


def features(path: Path):
    # Cells and blocks of Dalal and Triggs, as in the documentation of skimage.feature.hog.
    from skimage.feature import hog

    picture = Image.open(path).convert("RGB").resize((32, 32))
    return hog(
        picture, orientations=9, pixels_per_cell=(8, 8), channel_axis=-1, cells_per_block=(2, 2)
    )


def all_features(files: list[Path]) -> list:
    return Parallel(n_jobs=-1)(delayed(features)(file) for file in files)


if samples.is_texts(folder):
    train, test = (samples.texts(folder / f"{split}.csv") for split in ("train", "test"))
    # The grid of the documentation's "Sample pipeline for text feature extraction and evaluation"
    # has these n-grams; sublinear_tf is from "Classification of text documents".
    model = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2),
        LogisticRegression(C=10, max_iter=1000),
    )
else:
    train, test = (samples.pictures(folder / split) for split in ("train", "test"))
    train, test = ((all_features(files), labels) for files, labels in (train, test))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))

model.fit(*train)
samples.write(output, test[1], model.predict(test[0]))
