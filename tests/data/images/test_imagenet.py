"""ImageNet's layouts: a flat val/ with a file of classes, and names for synsets."""

import numpy as np
import pytest
from data.images.picture_trees import load, make_tree, refused

CLASSES = ("n01", "n02", "n03")


@pytest.fixture
def imagenet(tmp_path):
    """train/ of three synsets, and a val/ of four pictures without class folders."""
    tree = make_tree(tmp_path / "imagenet", ("train", "val"), CLASSES, per_class=2)
    for number, path in enumerate(sorted((tree / "val").glob("*/*"))[:4]):
        path.rename(tree / "val" / f"ILSVRC2012_val_{number:08}.JPEG")
    for name in CLASSES:
        for path in (tree / "val" / name).iterdir():
            path.unlink()
        (tree / "val" / name).rmdir()
    return tree


def mapping(row, header=""):
    rows = zip(range(4), ("n02", "n03", "n01", "n02"), (1, 2, 0, 1), strict=True)
    return header + "".join(
        row.format(n=n, folder=folder, label=label) for n, folder, label in rows
    )


@pytest.mark.parametrize(
    "name, content",
    [
        ("val.txt", mapping("ILSVRC2012_val_{n:08}.JPEG {label}\n")),
        ("val/val.csv", mapping("ILSVRC2012_val_{n:08}.JPEG,{folder}\n", "file,class\n")),
        ("val/val_annotations.txt", mapping("ILSVRC2012_val_{n:08}.JPEG\t{folder}\t0\t0\n")),
        (
            "LOC_val_solution.csv",
            mapping("ILSVRC2012_val_{n:08},{folder} 1 2 3 4\n", "ImageId,PredictionString\n"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("decode", ["once", "always"])
def test_a_flat_val(imagenet, name, content, decode):
    (imagenet / name).write_text(content)
    data = load(imagenet, decode=decode)
    assert data.test.labels.tolist() == [1, 2, 0, 1] and data.classes == list(CLASSES)
    assert np.array_equal(data.train.labels, [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    "renamed, rows, expected",
    [
        # Two pictures of one stem, each with its line.
        ("0.png 0.jpg 1.png 1.jpg", "0.png,n01 0.jpg,n02 1.png,n02 1.jpg,n03", [1, 0, 2, 1]),
        # By stems, one of which has a dot.
        ("0.v2.png 1.jpg 2.jpg 3.jpg", "0.v2,n01 1,n02 2.JPEG,n03 3.jpg,n01", [0, 1, 2, 0]),
        # A line of another file tells nothing.
        ("0.png 0.jpg 2.jpg 3.jpg", "0.png,n01 2,n03 3,n01", "does not name the class of 0.jpg"),
        ("0.png 0.jpg 2.jpg 3.jpg", "0,n01 2,n03 3,n01", "is not the only picture of that name"),
        ("0.png 1.jpg 2.jpg 3.jpg", "0.JPEG,n01 0.jpg,n02", "gives 0 the classes 'n01' and 'n02'"),
        ("0.png 1.jpg 2.jpg 3.jpg", "0.png,n01 0.png,n02", "gives 0.png the classes 'n01' and"),
    ],
)
def test_pictures_are_looked_up_by_their_whole_names_first(imagenet, renamed, rows, expected):
    for path, name in zip(sorted((imagenet / "val").iterdir()), renamed.split(), strict=True):
        path.rename(imagenet / "val" / name)
    (imagenet / "val.csv").write_text("\n".join(["file,label", *rows.split()]))
    if isinstance(expected, str):
        refused(imagenet, imagenet / "val.csv", expected)
    else:
        assert load(imagenet).test.labels.tolist() == expected


def test_a_folder_of_images_inside(imagenet):
    inner = imagenet / "val" / "images"
    inner.mkdir()
    for path in (imagenet / "val").glob("*.JPEG"):
        path.rename(inner / path.name)
    (imagenet / "val.txt").write_text(mapping("ILSVRC2012_val_{n:08}.JPEG {label}\n"))
    assert load(imagenet, decode="always").test.labels.tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize(
    "name, row",
    [
        ("val.csv", "ILSVRC2012 val_{n:08}.JPEG, golden {folder} ,0\n"),
        ("val.csv", '"ILSVRC2012 val_{n:08}.JPEG","golden {folder}"\n'),
        ("val.txt", "ILSVRC2012 val_{n:08}.JPEG\tgolden {folder}\t0, 1\n"),
        ("LOC_val_solution.csv", "ILSVRC2012 val_{n:08},{label} 1 2 3 4\n"),
        ("val.csv", "ILSVRC2012 val_{n:08},{label} 1 2 3 4\n"),
        ("val.csv", "ILSVRC2012 val_{n:08}\t{label}, and more\n"),
        ("val.csv", f"{'x' * 200_000}\nILSVRC2012 val_{{n:08}},{{label}}\n"),
    ],
)
def test_names_with_blanks(imagenet, name, row):
    for folder in CLASSES:
        (imagenet / "train" / folder).rename(imagenet / "train" / f"golden {folder}")
    for path in list((imagenet / "val").iterdir()):
        path.rename(path.with_name(path.name.replace("_", " ", 1)))
    (imagenet / name).write_text(mapping(row))
    assert load(imagenet, decode="always").test.labels.tolist() == [1, 2, 0, 1]


def test_commas_after_the_class(imagenet):
    (imagenet / "val.txt").write_text(mapping("ILSVRC2012_val_{n:08}.JPEG {folder} crane, bird\n"))
    assert load(imagenet, decode="always").test.labels.tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize("name", ["val.txt", "validation.txt"])
def test_a_flat_folder_called_validation(imagenet, name):
    (imagenet / "val").rename(imagenet / "validation")
    (imagenet / name).write_text(mapping("ILSVRC2012_val_{n:08}.JPEG {label}\n"))
    assert load(imagenet, decode="always").test.labels.tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize("inner", ["", "images"])
def test_a_test_folder_without_classes_is_left_out(imagenet, inner):
    """As in tiny-imagenet-200, and in Kaggle's copy of ImageNet."""
    folder = imagenet / "test" / inner
    folder.mkdir(parents=True)
    for number, path in enumerate(sorted((imagenet / "val").iterdir())):
        (folder / f"test_{number}.JPEG").write_bytes(path.read_bytes())
    refused(imagenet, imagenet / "val", "or move the folder away")
    (imagenet / "val.txt").write_text(mapping("ILSVRC2012_val_{n:08}.JPEG {label}\n"))
    data = load(imagenet, decode="always")
    assert data.val_is_test and data.val is None and data.test.labels.tolist() == [1, 2, 0, 1]
    assert data.notes[0] == "test/ has no classes: 4 pictures for --predict"
    (imagenet / "test.txt").write_text("".join(f"test_{n}.JPEG {n % 3}\n" for n in range(4)))
    data = load(imagenet, decode="always")
    assert len(data.val) == 4 and data.test.labels.tolist() == [0, 1, 2, 0]


def test_what_is_wrong_with_it(imagenet):
    refused(imagenet, imagenet / "val", "add a file with the class of each picture")
    (imagenet / "val.txt").write_text("ILSVRC2012_val_00000000.JPEG 1\n")
    refused(imagenet, imagenet / "val.txt", "ILSVRC2012_val_00000001.JPEG")
    (imagenet / "val.txt").write_text(mapping("ILSVRC2012_val_{n:08}.JPEG n07\n"))
    refused(imagenet, imagenet / "val.txt", "'n07'")


def test_names_of_synsets(imagenet):
    (imagenet / "val.txt").write_text(mapping("ILSVRC2012_val_{n:08}.JPEG {label}\n"))
    names = imagenet / "LOC_synset_mapping.txt"
    names.write_text("n01 tench, Tinca tinca\nn02 crane\nn03 crane\nn04 not here\n")
    expected = ["tench, Tinca tinca", "crane (n02)", "crane (n03)"]
    for decode in ("once", "always"):
        assert load(imagenet, decode=decode).classes == expected
        data = load(imagenet, decode=decode, classes=expected)  # all, for a trained model
        assert data.classes == expected
        assert data.test.labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 2, 0, 1]
    names.write_text("n01 tench\n")  # not all of them
    assert load(imagenet).classes == list(CLASSES)
