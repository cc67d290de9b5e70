"""Other names for settings and their values."""

# Names that users of timm, torchvision's references and hand-made scripts type -> the setting. Each
# works on the command line and as a YAML key, if the entry has the setting.
ALIASES = {
    "amp_dtype": "precision",
    "b": "batch_size",
    "bs": "batch_size",
    "clip_grad": "clip",
    "clip_grad_norm": "clip",
    "crop_pct": "crop_ratio",
    "cutmix": "cutmix_alpha",
    "data_path": "data_dir",
    "decay_epochs": "step_epochs",
    "decay_milestones": "milestones",
    "decay_rate": "gamma",
    "epoch": "epochs",
    "grad_accum_steps": "accumulation_steps",
    "img_size": "image_size",
    "j": "workers",
    "log_interval": "log_every",
    "lr_gamma": "gamma",
    "lr_min": "min_lr",
    "lr_scheduler": "sched",
    "lr_step_size": "step_epochs",
    "lr_warmup_epochs": "warmup_epochs",
    "mixup_alpha": "mixup",
    "model_ema_decay": "ema_decay",
    "opt": "optimizer",
    "output_dir": "output",
    "patience_epochs": "plateau_patience",
    "r": "resume",
    "random_erase": "random_erasing",
    "reprob": "random_erasing",
    "smoothing": "label_smoothing",
    "test_only": "eval_only",
    "torchcompile": "compile",
    "use_deterministic_algorithms": "deterministic",
    "wd": "weight_decay",
    "weights": "pretrained",
}
# Flags without a value -> the setting and value that they are short for; in YAML `ngd: true`.
SHORT_FOR = {"meta_learning": ("mixup", "meta"), "ngd": ("optimizer", "ngd")}
# Settings whose value may be a number in place of a word: --mixup 0.2 is short for --mixup fixed
# --alpha 0.2, and --mixup 0 for --mixup none.
NUMBER_FOR = {"mixup": ("fixed", "alpha", "none")}
# Other spellings of a value.
VALUE_ALIASES = {
    "mixup_mode": {"elem": "sample"},
    "precision": {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"},
    "sched": {
        "cosineannealinglr": "cosine",
        "linearlr": "linear",
        "multisteplr": "multistep",
        "onecyclelr": "onecycle",
        "reducelronplateau": "plateau",
        "steplr": "step",
    },
}
