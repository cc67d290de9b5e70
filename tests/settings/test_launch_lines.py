"""Command lines that people have, as they type them."""

from pathlib import Path

import pytest

import resnet50_test
import transformer_test
import vit_test
from tuning.entry import target_of
from tuning.flags import for_trials
from utils.errors import UserError
from utils.launch.flags import take_launch_flags
from utils.settings.config import fields, parse

SETTINGS = {
    "resnet50_test.py": resnet50_test.Settings,
    "transformer_test.py": transformer_test.Settings,
    "vit_test.py": vit_test.Settings,
    "tuning/resnet50_tuning.sh": target_of("resnet50").search_class,
    "tuning/transformer_tuning.sh": target_of("transformer").search_class,
}
TEXT = Path(__file__).with_name("launch_lines.txt").read_text(encoding="utf-8")
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]


def parsed(command: str, pictures: Path, say=lambda line: None):
    script, *argv = command.replace("PICTURES", str(pictures)).split()
    argv = for_trials(argv) if script.startswith("tuning/") else argv
    argv, _ = take_launch_flags(argv, fields(SETTINGS[script]))
    return parse(SETTINGS[script], argv, "", say)[0]


@pytest.fixture
def pictures(tmp_path) -> Path:
    (tmp_path / "train").mkdir()
    return tmp_path


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split())[:60])
def test_a_line_is_understood_or_refused_with_what_to_do(line, pictures):
    verdict, _, command = line.replace("runs ", "runs:      ", 1).partition(":")
    words, _, command = command.rpartition("      ")
    if verdict == "runs":
        parsed(command.strip(), pictures)
        return
    with pytest.raises(UserError) as refused:
        parsed(command.strip(), pictures)
    text = str(refused.value)
    assert all(word in text for word in words.split()), text
    assert "did you mean" not in text and "\n" not in text


def test_what_the_names_stand_for(pictures):
    lines = []
    timm = parsed(next(line for line in LINES if "--opt-betas" in line)[5:], pictures, lines.append)
    assert (timm.dataset, timm.data_dir) == ("imagefolder", str(pictures))
    assert lines == [f"note: --dataset imagefolder, since {pictures} has a folder train/"]
    assert (timm.betas, timm.eps, timm.warmup_lr, timm.ema_decay) == (
        "0.9,0.999",
        1e-6,
        1e-6,
        0.9998,
    )
    assert (timm.precision, timm.wandb, timm.alpha, timm.workers) == ("auto", "online", 0.8, 8)
    face = parsed(next(line for line in LINES if "--warmup_ratio" in line)[5:], pictures)
    assert (face.lr, face.epochs, face.batch_size, face.accumulation_steps) == (2e-5, 3, 32, 2)
    assert (face.clip, face.precision, face.checkpoint_hist) == (1.0, "bf16", 2)
    assert (face.warmup_ratio, face.max_len, face.wandb) == (0.1, 128, "online")
    qsr = parsed(next(line for line in LINES if "--physical-batch-size" in line)[5:], pictures)
    assert (qsr.global_batch, qsr.batch_size, qsr.betas) == (4096, 128, "0.9,0.999")


def test_single_numbers_of_a_setting(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optimizer: adamw\nadam_beta1: 0.8\n")
    flags = ["--config", str(recipe), "--device", "cpu"]
    assert parse(resnet50_test.Settings, flags, "")[0].betas == "0.8,0.999"
    flags = ["--optimizer", "adamw", "--beta2", "0.95"]
    assert parse(resnet50_test.Settings, flags, "")[0].betas == "0.9,0.95"
    assert parse(resnet50_test.Settings, [*flags, "--beta1", "0.7"], "")[0].betas == "0.7,0.95"


def test_harmless_flags_get_a_line(pictures):
    lines = []
    command = next(line for line in LINES if "--workers 4 --bs 256 --distributed" in line)[5:]
    settings = parsed(command, pictures, lines.append)
    assert lines == [
        "note: --workers has no effect: --dataset cifar10 is in memory, unless --image_size "
        "resizes it"
    ]
    assert settings.workers is None


def test_without_a_data_folder_the_current_one_does_not_count(pictures, monkeypatch):
    monkeypatch.chdir(pictures)
    lines = []
    assert parsed("resnet50_test.py --epochs 3", pictures, lines.append).dataset == "cifar10"
    assert lines == []


def test_class_folders_alone_are_an_imagefolder(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.jpg").touch()
    lines = []
    settings = parsed(f"resnet50_test.py {tmp_path}", tmp_path, lines.append)
    assert settings.dataset == "imagefolder"
    assert lines == [f"note: --dataset imagefolder, since there are pictures in {tmp_path}/cats"]


@pytest.mark.parametrize(
    "files, dataset",
    [
        ("train.csv images/1.jpg", "csv"),
        ("train.csv train/1.jpg test/1.jpg", "csv"),
        ("train.tsv train/train/1.jpg", "csv"),
        ("train.csv train/cats/1.jpg", "imagefolder"),
        ("other.csv train/1.jpg", "imagefolder"),
    ],
)
def test_a_list_of_training_pictures_is_taken_unless_they_lie_in_class_folders(
    tmp_path, files, dataset
):
    for path in map(tmp_path.joinpath, files.split()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    lines = []
    settings = parsed(f"resnet50_test.py {tmp_path}", tmp_path, lines.append)
    assert settings.dataset == dataset and len(lines) == 1
    assert (
        lines[0] == f"note: --dataset csv, since {tmp_path} has a list of training pictures"
    ) == (dataset == "csv")


def test_a_search_by_the_flags_of_the_scripts_that_it_replaces(pictures):
    lines, words = [], "--bs 256 --ngd --alpha 0.99 --gamma 0.75 --epoch 5"
    search = parsed(f"tuning/resnet50_tuning.sh {words}", pictures, lines.append)
    assert (search.mixup, search.alpha, search.trial_epochs) == ("fixed", 0.99, 5)
    assert lines == [
        "note: --mixup fixed, since --alpha 0.99 is given",
        "note: --gamma has no effect: --sched cosine does not use it, which is for --sched step, "
        "multistep, plateau",
    ]
    assert parsed("tuning/resnet50_tuning.sh -e5", pictures).trial_epochs == 5
    for mixup in ("none", "meta", "0.99"):
        search = parsed(f"tuning/resnet50_tuning.sh {words} --mixup {mixup}", pictures)
        assert search.mixup == mixup.replace("0.99", "fixed")
    assert parsed("resnet50_test.py --alpha 0.99", pictures).mixup == "none"


def test_a_recipe_that_is_a_program_is_refused_with_one_that_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        parsed("vit_test.py --config vit-b16.py", tmp_path)
    recipe = str(refused.value).partition(", such as ")[2]
    assert recipe == "recipes/vit_b16_imagenet.yaml"
    parsed(f"vit_test.py --config {recipe}", tmp_path)  # from any folder


def test_the_copy_of_the_model_replaces_no_file(tmp_path):
    lines, flags = [], f"resnet50_test.py --checkpoint {tmp_path}/model.pth"
    parsed(flags, tmp_path, lines.append)
    assert f"{tmp_path}/model.safetensors" in lines[0] and "manual_transfer.yaml" in lines[0]
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"model\.safetensors is there: --pretrained FILE"):
        parsed(flags, tmp_path)


def test_the_copy_of_the_model_keeps_a_number_in_its_name(tmp_path):
    for name in ("model_lr0.1", "model_lr0.2"):
        lines = []
        parsed(f"resnet50_test.py --checkpoint {tmp_path}/{name}", tmp_path, lines.append)
        assert f"{tmp_path}/{name}.safetensors" in lines[0]
