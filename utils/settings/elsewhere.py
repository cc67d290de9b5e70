"""Flags and YAML keys from elsewhere that are no settings here: those that change no result, and
those whose value decides what they stand for. (Other names of settings, and what replaces a flag
whatever its value, are in aliases.py.)

Sources: train.py of timm, main.py of hmgxr128/QSR, Lance0218's guide to DDP, Apex, DeepSpeed.
"""

import re
from collections.abc import Callable, Mapping

from .aliases import LOCAL, MEANINGS
from .values import choices_of, convert

_HARMLESS = {
    "amp_impl": "--amp computes by PyTorch's autocast",
    "backend": "it follows from the device: NCCL for GPUs, gloo for CPUs",
    "base": "only the schedule cosine_step reads it, which is not supported",
    "bn": "it follows from the model",
    "dist_bn": "BatchNorm's statistics are averaged over the processes, as with reduce",
    "debug log_each_layer": "log.txt and metrics.jsonl have what is logged",
    "grad_scaler grad_scaler_growth_factor grad_scaler_max_retries grad_upscale loss_scale":
    "the loss scale of fp16 is found while training",
    "keep_batchnorm_fp32": "weights and statistics of BatchNorm are always in float32",
    "master_port": "a free port is found; RDZV_ENDPOINT=HOST:PORT names one for several nodes",
    "no_ddp_bb no_prefetcher pin_mem sched_on_updates use_multi_epochs_loader worker_seeding":
    "there is no such choice here, and results do not depend on it",
    "save_opt multiple_optimizers": "checkpoints hold the optimizer's state, of every worker",
}  # fmt: skip
ON, OFF = "|1|true|yes|on", r"0(?:\.0*)?|false|no|off|none|null"
# Values of harmless flags; not any word, which may be a folder that another parser takes.
PLAIN = rf"{ON}|{OFF}|[\d.][\d.e-]*|nccl|gloo|mpi|native|apex|reduce|broadcast|dynamic|all|part"
SEVERAL = ("ckpt_to_save", "input_size", "mean", "ratio", "scale", "std")  # they take more values
# Flag -> {regular expression of its value, which is empty where the flag stands alone: the settings
# that say the same, with \1 for what the first group has matched, and a note; {} if it asks for
# what is done anyway; or a text that says what to do instead}. The first that fits counts. If none
# does, the flag is a setting, or MEANINGS has a text on it.
_BY_VALUE: dict[str, dict[str, Mapping[str, str] | str]] = {
    "alpha": {r"0+\.?0*": "leave it out: --mixup none mixes nothing, and --sync_rule constant "
              "--sync_base 4 has rounds of 4 local steps"},
    "apex_amp native_amp": {ON: {"precision": "auto"}},
    "avg_m avg_v": {OFF: {}, ON: "--optimizer_average averages both of Adam's moments"},
    "aug_splits bce_loss cpu_offload jsd_loss multi_label multilabel regression vflip": {OFF: {}},
    "cooldown_epochs": {OFF: {}, r"(\d+)": r"add \1 to --epochs, but not to --epochs_for_sched"},
    "d": {"(?:torch|tfds|hfds|wds)/(.*)": r"write --dataset \1, or its tar or parquet for shards",
          "(.*[./~].*)": {"data_dir": r"\1"},
          "(.+)": {"dataset": r"\1", "note": r"the folder of the data would be ./\1"}},
    "data_dir": {r".*\.beton": "FFCV's files are not read: give the pictures that it was made of, "
                 "as --dataset imagefolder or, in large files, tar"},
    "device": {"cuda:0|gpu": {"device": "cuda"},
               r"cuda:(\d+)": r"CUDA_VISIBLE_DEVICES=\1 python ... chooses the GPU"},
    "dtype": {"16|fp16|float16|half": {"precision": "fp16"}, "bf16": {"precision": "bf16"},
              "32|fp32|float32|float": {"precision": "fp32"}},
    "fsdp": {OFF: {}, ON: {"strategy": "fsdp"}},
    "group_weight": {OFF: {"decay_all": "true"}, ON: {"decay_all": "false"}},
    "in_chans": {"3": {}},
    "init_model_by_seed": {"-1": {}},
    "input_size": {r"[13] (\d+) \1": {"image_size": r"\1"}},
    "log_per_step": {OFF: {"log_every": "20"},
                     ON: {"log_every": "1", "note": "the host waits in every step"}},
    "model": {
        "resnet(18|34|50|101|152)": {"depth": r"\1"},
        "vit_base": {
            "model": "vit", "patch_size": "16", "layers": "12", "dim": "768", "heads": "12",
            "ffn": "3072", "pooling": "mean", "positions": "sincos", "image_size": "224",
        },
    },
    # A number is --print-freq of PyTorch's example; a folder is that of all runs.
    "model_path p": {r"(\d+)": {"log_every": r"\1"}, "(.+?)/*": {"output": r"\1/"}},
    "no_aug": {OFF: {}, ON: {"crop": "padded", "crop_padding": "0", "hflip": "0", "cutout": "0",
                             "auto_augment": "none", "color_jitter": "0", "random_erasing": "0"}},
    "optimizer": {
        "adam": "adamw with --weight_decay 0 is the same; with decay, Adam adds it to the gradient "
        "and scales it, AdamW takes it from the weights",
        "lion": "the nearest is adamw, with 3 to 10 times the learning rate and as much less decay",
        "mirrormadgrad": "the nearest is madgrad, from which it was made",
        "momentum": {"optimizer": "sgd", "nesterov": "false"},
    },
    "recount": {"1": {}},
    "resume_from_epoch resume_from_step start_epoch": {"0": {}},
    "save_freq": {r"([1-9]\d*)": {"save_every": r"\1e"}},
    "steps_per_epoch": {"-1": {"steps_per_epoch": "none"}},
    "strong_aug": {
        OFF: {"auto_augment": "none", "mixup": "none"},
        ON: {"auto_augment": "rand-m10-n2", "mixup": "0.2", "mixup_mode": "block",
             "note": "also in place of a recipe's; timm's RandAugment is not quite Composer's"},
    },
    "t warmup_type": {
        "linear": {"note": "the warm-up is linear; --sched says what follows it"},
        "cosine": {"sched": "cosine", "note": "after a linear warm-up"},
    },
    "warmup": {"[01]|true|false": {}, "(.*)": r"write --warmup_epochs \1 or --warmup_steps \1"},
}  # fmt: skip
_BY_VALUE |= {names: {PLAIN: {"note": note}} for names, note in _HARMLESS.items()}
BY_VALUE = {name: cases for names, cases in _BY_VALUE.items() for name in names.split()}
# Flags whose settings give way where these are given, too; but --depth contradicts --model.
PRESETS = ("log_per_step", "model", "strong_aug")


def words_of(value: object) -> str:
    """A value of a flag or of YAML as a text: words with spaces, true, false or none."""
    names = {"True": "true", "False": "false", "None": "none"}
    words = value if isinstance(value, list) else [value]
    return " ".join(names.get(str(word), str(word)) for word in words)


def names_from_elsewhere(known: Mapping) -> set[str]:
    """The flags of this module and of MEANINGS that the entry does not have itself."""
    return {*BY_VALUE, *MEANINGS} - {*known}


def translate(known: Mapping, given: dict, shown: Callable, say: Callable) -> dict[str, str]:
    """Replaces flags of elsewhere in `given`, {name: value before conversion}, by the settings of
    the entry that they stand for. Returns {flag with its value: what to do instead} for those that
    are refused. `shown` says how the flag of a name was typed; `say` is called with notes."""
    refused: dict[str, str] = {}
    _make_rounds_constant(given, say)
    for name in [n for n in given if n in BY_VALUE or n in names_from_elsewhere(known)]:
        text = words_of(given[name])
        flag, case = f"{shown(name)} {text}".strip(), _case(known, name, text)
        if case is None:
            continue
        del given[name]
        if isinstance(case, str):
            refused[flag] = case
            continue
        note = case.pop("note", "")
        gives_way = name in PRESETS and "depth" not in case
        taken = {n: v for n, v in case.items() if n not in given or not gives_way}
        if "output" in given and "output" in taken:
            given["output"] = taken.pop("output") + given["output"]
        for setting, value in taken.items():
            both = given.setdefault(setting, value), value
            one, other = (convert(known[setting], each, f"--{setting}") for each in both)
            if one != other:
                refused[flag] = f"it stands for --{setting} {value}, which is given otherwise, too"
        same = " ".join(f"--{n} {v}" for n, v in taken.items() if (n, v) != (name, text))
        if same or note:
            say(f"note: {flag}: {'; '.join(filter(None, [same and f'taken as {same}', note]))}")
    return refused


def _case(known: Mapping, name: str, text: str) -> dict[str, str] | str | None:
    """What the value of a flag is taken as, or what to do instead; None: the flag is a setting."""
    cases = [*BY_VALUE.get(name, {}).items()]
    if name in known and text in choices_of(known[name].metadata):
        return None  # an optimizer of the user's own may have such a name
    if name not in known:
        cases += [("none|null|false", {}), (".*", MEANINGS.get(name, "leave it out"))]
    for pattern, case in cases:
        match = re.fullmatch(pattern, text, re.IGNORECASE)
        if match is not None and isinstance(case, str):
            return match.expand(case)
        if match is not None and not isinstance(case, str) and {*known, "note"} >= case.keys():
            return {setting: match.expand(value) for setting, value in case.items()}
    return None


def _make_rounds_constant(given: dict, say: Callable) -> None:
    """--alpha 0 of the QSR repository stands for rounds of --init-h steps; not where the rounds are
    given by a name of ours."""
    is_local = words_of(given.get("optimizer")).lower() in LOCAL
    is_ours = "sync_rule" in given or ("sync_base" in given and "sync_init" not in given)
    if is_local and not is_ours and re.fullmatch(r"0+\.?0*", words_of(given.get("alpha", 1))):
        steps = words_of(given.pop("sync_init", 1))
        for name in {"alpha", "qsr_power"} & {*given}:
            del given[name]
        given |= {"sync_rule": "constant", "sync_base": steps}
        say(f"note: --alpha 0: taken as --sync_rule constant --sync_base {steps}")
