"""The README and docs/: flags are explained, names exist, and tables agree with the code."""

import contextlib
import re
import subprocess

import pytest
import torch
from pages import ENTRIES, PAGES, PROJECT, RESULTS, ROOT, coded, rows, text

import resnet50_test
import transformer_test
import vit_test
from tuning.flags import READ_AS, TuningFlags
from utils.errors import UserError
from utils.launch.flags import FLAGS as LAUNCH_FLAGS
from utils.optim.schedules import SCHEDULES
from utils.optim.table import OPTIMIZERS
from utils.runs.advice import phase_advice
from utils.settings.aliases import ALIASES, GIVES_WAY, MEANINGS, PART_OF, SHORT_FOR
from utils.settings.config import INVOCATION_ONLY, fields, parse
from utils.settings.elsewhere import BY_VALUE
from utils.training.log import NOTABLE
from utils.training.objective import Precision


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_flag_is_on_the_page_of_flags(entry, capsys):
    with pytest.raises(SystemExit):
        ENTRIES[entry].main(["--help", "all"])
    listed = re.findall(r"^ {2}(-.*)", capsys.readouterr().out, re.M)
    flags = {flag for line in listed for flag in re.findall(r"(?<![\w-])--?[a-z]\w*", line)}
    assert len(flags) > 90
    assert flags <= coded(text("docs/flags.md"))


def test_flags_that_are_named_exist():
    own = {name for entry in ENTRIES.values() for name in fields(entry.Settings)}
    own |= {*fields(TuningFlags), *READ_AS}
    known = own | {f"no_{name}" for name in own} | set(ALIASES) | set(SHORT_FOR)
    known |= {*PART_OF, *LAUNCH_FLAGS, *BY_VALUE, *MEANINGS}
    foreign = {"help", "shm-size", "logdir"}  # docker's, TensorBoard's
    foreign |= {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "requeue"}  # Slurm's
    foreign |= {"ntasks", "kill-on-bad-exit", "nproc-per-node", "nproc_per_node", "hostfile"}
    foreign |= {"pid", "local-dir"}  # py-spy's, hf's
    foreign |= {"shard_size"}  # of utils/data/images/pack.py
    for page in PAGES:
        named = re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text(encoding="utf-8"))
        assert {name for name in named if name.replace("-", "_") not in known} <= foreign, page


def test_differences_for_texts_are_listed():
    """Other defaults of flags that both entries have, except the data set."""
    pictures, texts = fields(resnet50_test.Settings), fields(transformer_test.Settings)
    table = text("docs/flags.md").split("differ in `transformer_test.py`:")[1].split("\n## ")[0]
    told = re.findall(r"^\| `--(\w+)` \| `?(\w+)`? by default \(pictures: `?(\w+)`?\)", table, re.M)
    differ = {
        name for name in pictures.keys() & texts if pictures[name].default != texts[name].default
    }
    assert {name for name, *_ in told} == differ - {"dataset"}
    for name, of_texts, of_pictures in told:
        assert (of_texts, of_pictures) == (str(texts[name].default), str(pictures[name].default))


def test_differences_of_the_vision_transformer_are_listed():
    own, others = fields(vit_test.Settings), fields(resnet50_test.Settings)
    differ = {name for name in own.keys() & others if own[name].default != others[name].default}
    told = text("docs/flags.md").split("differ in `vit_test.py`:")[1].split("\n\n")[0]
    assert differ <= {word.removeprefix("--") for word in coded(told)}


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.name)
def test_recipes_are_valid_and_named(recipe):
    """Each can be read by one of the programs, and is named on the page of flags or by `make`."""
    settings = [entry.Settings for entry in ENTRIES.values()]
    fits = []
    for config_class in settings:
        with contextlib.suppress(UserError):
            parse(config_class, ["--config", str(recipe)], "")
            fits.append(config_class.task)
    assert len(fits) == 1
    named = text("docs/flags.md") + (ROOT / "Makefile").read_text()
    assert f"recipes/{recipe.name}" in named


def test_the_table_of_aliases():
    told = {
        alias.lstrip("-"): cells[0].strip("`-")
        for cells in rows("docs/flags.md", "## Names from elsewhere")[2:]
        for alias in re.findall(r"`([^`]+)`", cells[1])
    }
    assert told == ALIASES


def test_the_table_of_short_flags():
    told = {}
    for cells in rows("docs/flags.md", "## Short flags")[2:]:
        name, value = re.match(r"`--(\w+) (\S+)`", cells[1]).groups()
        told[cells[0].strip("`-")] = name, value, "gives way" in cells[1]
    assert told == {
        flag: (name, str(value), flag in GIVES_WAY) for flag, (name, value) in SHORT_FOR.items()
    }


def test_the_table_of_schedules():
    table = rows("docs/flags.md", "## Optimizer and learning rate")
    table = table[next(i for i, cells in enumerate(table) if cells[0] == "`--sched`") + 2 :]
    told = {cells[0].strip("`"): set(re.findall(r"--(\w+)", cells[2])) for cells in table}
    assert told == {name: set(own) - {"warmup"} for name, own in SCHEDULES.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_of_optimizers(name):
    """If this fails for a new one, add the row that it prints."""
    entry = OPTIMIZERS[name]
    flags = ", ".join(f"`--{flag}`" for flag in entry.settings)
    row = [f"`{name}`", entry.summary, flags]
    assert row in rows("docs/flags.md", "## Optimizer and learning rate"), (
        f"docs/flags.md: | {' | '.join(row)} |"
    )


def test_settings_that_a_resumed_run_may_change_are_listed():
    table = rows("docs/resume.md", "## What may change")[2:]
    told = [set(re.findall(r"--(\w+)", cells[1])) for cells in table]
    kinds = {"free": set(), "evaluation": set()}
    for entry in ENTRIES.values():
        for name, field in fields(entry.Settings).items():
            kinds.get(field.metadata["resume"], set()).add(name)
    assert set.union(*told[:-1]) == kinds["free"] - set(INVOCATION_ONLY) | {"output", "profile"}
    assert told[-1] == kinds["evaluation"]


def test_flags_that_are_refused_without_effect_are_listed():
    """Except those of the model and of the tokenizer, which the page does not name one by one."""
    told = text("docs/flags.md").split("or is one of ")[1].split(" For a ")[0]
    of_tokenizer = {"vocab_size", "min_freq", "vocab", "lowercase", "stopwords"}
    essential = {
        name
        for entry in ENTRIES.values()
        for name, field in fields(entry.Settings).items()
        if field.metadata["essential"]
    }
    assert set(re.findall(r"--(\w+)", told)) == essential - of_tokenizer


def test_advice_on_time_is_listed():
    table = rows("docs/performance.md", "## Where does the time go?")[2:]
    told = {cells[0].strip("`"): float(cells[1].removesuffix(" %")) / 100 for cells in table}
    assert told == NOTABLE

    class Loader:
        workers, batch_flag, features = 0, "--batch_size", None

    settings = resnet50_test.Settings(
        dataset="imagefolder", eval_every=1, optimizer="ngd", mixup="meta"
    )
    for phase, advice in phase_advice(
        settings, Precision("bf16", torch.device("cuda")), Loader()
    ).items():
        (helps,) = [cells[2] for cells in table if cells[0] == f"`{phase}`"]
        assert set(re.findall(r"--\w+", advice)) <= coded(helps), phase


def test_the_table_of_extras():
    told = {
        cells[0].strip("`"): sorted(cells[1].split(", ")) for cells in rows("docs/install.md")[2:]
    }
    assert told.pop("all") == ["those of the extras above"] and "all" not in told
    extras = {
        extra: sorted(re.match(r"[\w-]+", line)[0] for line in lines)
        for extra, lines in PROJECT["optional-dependencies"].items()
    }
    assert extras.pop("all") == ["fewhours"]
    assert told == extras
    (listed,) = re.findall(r"to safetensors: (.+?)\.", text("docs/install.md"), re.S)
    needed = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert {*re.findall(r"\w+", listed)} - {"and"} == needed


def test_links_and_named_files_exist():
    for page in [*PAGES, *RESULTS]:
        content = page.read_text(encoding="utf-8")
        for name in re.findall(r"\]\((?!http)([^)#]+)\)", content):
            assert (page.parent / name).exists(), f"{page}: {name}"
        for name in re.findall(r"`((?:utils|recipes|docs|tests)/[\w/.]+)`", content):
            assert (ROOT / name).exists(), f"{page}: {name}"
    readme = text("README.md")
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in readme
    targets = {
        target for page in PAGES for target in re.findall(r"`make ([\w-]+)", page.read_text())
    }
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
